"""An agent as it is deployed, but what may still be read or written unseen is kept for HOLD_S and not for a minute.

The processes of a stress run are frozen for less than that, so the law is the same one; and a small pool is not full of
what its dead readers left for most of the run.
"""

from __future__ import annotations

import sys
from functools import partial

import replica_agent.replica
from replica_agent.__main__ import main
from replica_agent.kv.service import KvService

HOLD_S = 5.0

if __name__ == "__main__":
    replica_agent.replica.KvService = partial(KvService, hold_s=HOLD_S)  # type: ignore[assignment, misc]
    sys.exit(main())

"""What an engine asks its agent first: which of a prompt's blocks can be had?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvstore import engine_messages as wire
from kvstore.hint import Hint
from replica_agent.engines.pool_client import PoolClient


class Question:
    """Which of `keys`, that follow the first `cached` blocks of a prompt of `tokens` tokens, are there? Owns whether
    the agent knows of it; used by one thread. Raises PoolGone where `PoolClient` does."""

    def __init__(
        self, client: PoolClient, request: str, keys: Sequence[bytes], cached: int, tokens: int, hint: Hint | None
    ) -> None:
        self._most = len(keys)
        self._asked = False
        self._prepare = partial(client.prepare, request, keys, cached, tokens, hint)
        self._poll = partial(client.poll, request)
        self._cancel = partial(client.cancel, request)

    def ask(self, wait_s: float) -> tuple[int, float] | None:
        """Blocks, and the seconds until they are ready or given up; none: the agent keeps nothing for it. None as long
        as the agent has not decided, which it may take `wait_s` for."""
        first, self._asked = not self._asked, True
        match self._prepare() if first else self._poll(wait_s):
            case wire.Pending():
                return None
            case wire.Accepted() as answer if answer.blocks > 0:
                return min(answer.blocks, self._most), answer.deadline_s + wire.DECISION_S
            case wire.Nothing():
                pass
            case _:
                # No block accepted, or some there that were not: nothing that can be used.
                self._cancel()
        return 0, 0.0

    def cancel(self) -> None:
        """It is not wanted any more."""
        if self._asked:
            self._cancel()

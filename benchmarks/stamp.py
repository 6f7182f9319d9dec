"""When and where a figure was measured, as every result says it."""

from __future__ import annotations

import datetime
import os
import platform


def stamp() -> dict[str, str]:
    """`date` and `host`, to be merged into a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, shared",
    }

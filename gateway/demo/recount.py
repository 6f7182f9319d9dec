"""The same figures from another source: what the engines' own block tables say about duplication."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

SETTLE_S = 10.0


@dataclass(frozen=True)
class Recount:
    """Excess bytes as the gateway's ledger has them, and as counted from the engines' tables."""

    ledger_bytes: int
    engines_bytes: int

    @property
    def equal(self) -> bool:
        """Whether both agree to the byte."""
        return self.ledger_bytes == self.engines_bytes


async def excess_of_engines(client: httpx.AsyncClient, engines: Sequence[str]) -> int:
    """Sum over blocks of (replicas that hold it - 1) x bytes, from `GET /debug/blocks` of every engine."""
    copies: Counter[str] = Counter()
    block_bytes = 0
    for engine in engines:
        response = await client.get(f"{engine}/debug/blocks")
        response.raise_for_status()
        table = response.json()
        block_bytes = table["block_bytes"]
        copies.update({block["hash"] for block in table["blocks"]})
    return sum(count - 1 for count in copies.values()) * block_bytes


async def recount(
    client: httpx.AsyncClient, engines: Sequence[str], ledger_bytes: Callable[[], Awaitable[int]]
) -> Recount:
    """Compare both once nothing moves any more: reports are milliseconds behind the engines."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = Recount(await ledger_bytes(), await excess_of_engines(client, engines))
        if found.equal or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)

"""What one connection of an engine asks of the pool, and what is held for it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvstore import engine_messages as wire
from kvstore.errors import ProtocolError
from kvstore.namespace import unpack_content_keys
from kvstore.pool import Held, Pool
from replica_agent.kv.decision import Estimates
from replica_agent.kv.fetch import Surroundings
from replica_agent.kv.searches import Searches

COMMITS_A_TURN = 8
"""Blocks sealed before other tasks have their turn: each costs a checksum over all its bytes."""

WRITE_S = 60.0
"""A slot that was reserved for so long and not committed is taken back, and quarantined."""


class EngineSession:
    """Owns the slots that this connection has reserved and not committed yet, and the searches it has begun.

    Used on one event loop, by one connection's questions, one at a time. When the connection is gone, nobody can say
    whether the engine still writes or reads: what it was writing is quarantined, what it was reading is held on to.
    """

    def __init__(
        self,
        around: Surroundings,
        searches: Searches,
        estimates: Estimates,
        *,
        engine_id: str,
        rank: int | None,
        writer: int | None,
        block_tokens: int,
        cleared: Callable[[], None],
        closed: Callable[[EngineSession], None],
        hang_up: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rank` is whose share the connection copies, None for a scheduler's, which copies none; `writer` the number
        under which that rank commits, None where another rank writes the same share."""
        self.engine_id = engine_id
        self.hang_up = hang_up
        self._around = around
        self._searches = searches
        self._estimates = estimates
        self._rank = rank
        self._writer = writer
        self._block_tokens = block_tokens
        self._cleared = cleared
        self._closed = closed
        self._clock = clock
        self._writing: dict[Held, float] = {}
        self._over = False

    @property
    def writing(self) -> int:
        """Slots reserved and not committed."""
        return len(self._writing)

    async def answer(self, question: wire.Question) -> wire.Answer:
        """The answer to one question. Raises ProtocolError for one that makes no sense."""
        if self._over:
            raise ProtocolError("another life of the engine has taken over")
        match question:
            case wire.Poll():
                return await self._searches.poll(question.request, question.wait_s)
            case wire.Prepare():
                return self._prepare(question)
            case wire.Lookup():
                return wire.Found(blocks=self._pool.lookup(_keys(question.keys)))
            case wire.Reserve():
                return self._reserve(question)
            case wire.Commit():
                return await self._commit(question)
            case wire.Release():
                self._searches.release(question, self._rank)
            case wire.Cancel():
                self._searches.cancel(question.request)
            case wire.Failed():
                self._searches.failed(question)
            case wire.Clear():
                self._cleared()
            case wire.Observe():
                self._estimates.prefilled(question.tokens, question.attended, question.seconds)
        return wire.Done()

    def expire(self) -> None:
        """Takes back what has been reserved for too long."""
        late = self._clock() - WRITE_S
        for held in [held for held, since in self._writing.items() if since < late]:
            del self._writing[held]
            self._pool.abandon(held, stopped=False)

    def close(self) -> None:
        """Releases everything that is held for the connection; calling it again does nothing."""
        if self._over:
            return
        self._over = True
        self._searches.drop(self)
        for held in self._writing:
            self._pool.abandon(held, stopped=False)
        self._writing.clear()
        self._closed(self)

    @property
    def _pool(self) -> Pool:
        return self._around.pool

    def _prepare(self, question: wire.Prepare) -> wire.Answer:
        if question.cached_blocks < 0 or question.prompt_tokens < 0:
            raise ProtocolError("cached_blocks, prompt_tokens: must not be negative")
        return self._searches.prepare(self, self._around, question, _keys(question.keys), self._block_tokens)

    def _reserve(self, question: wire.Reserve) -> wire.Reserved:
        keys = _keys(question.keys)
        given: list[Held | None] = [None] * len(keys)
        if self._writer is not None:
            given = self._pool.reserve(keys, question.parent, rank=self._writer)
        now = self._clock()
        self._writing.update((held, now) for held in given if held is not None)
        return wire.Reserved(
            slots=[-1 if held is None else held.slot for held in given],
            generations=[0 if held is None else held.generation for held in given],
        )

    async def _commit(self, question: wire.Commit) -> wire.Committed:
        keys = _keys(question.keys)
        if not len(keys) == len(question.slots) == len(question.generations) == len(question.written):
            raise ProtocolError("a commit needs one slot, generation and written for each key")
        visible = 0
        told = zip(keys, question.slots, question.generations, question.written, strict=True)
        for count, (key, slot, generation, written) in enumerate(told, 1):
            held = Held(slot, generation)
            # What this connection has not reserved, or no longer, is somebody else's.
            if self._writing.pop(held, None) is None or self._writer is None:
                continue
            if written:
                visible += self._pool.commit(self._writer, key, held)
            else:
                self._pool.abandon(held)
            if count % COMMITS_A_TURN == 0:
                await asyncio.sleep(0)
        return wire.Committed(blocks=visible)


def _keys(packed: bytes) -> list[bytes]:
    try:
        return unpack_content_keys(packed)
    except ValueError as error:
        raise ProtocolError(f"keys: {error}") from error

"""The searches of all requests of an engine, by its own id of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvstore.engine_messages import MAX_WAIT_S, Accepted, Failed, Loading, Nothing, Pending, Prepare, Ready, Release
from replica_agent.kv.fetch import Surroundings
from replica_agent.kv.search import Desk, Search, State

GRACE_S = 30.0
"""An engine that says nothing of a request for so long after its deadline has forgotten it."""

MAX_SEARCHES = 4_096
"""Requests at once; an engine runs hundreds."""

_A = TypeVar("_A")


class Searches:
    """Owns the searches and which connection each belongs to; used on one event loop.

    Every verb is idempotent: asking for the same again says how far it is, and of a request that is not known nothing
    is held. A search is forgotten once its engine has been told that it is over, or has said so itself.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._searches: dict[str, tuple[object, Search]] = {}

    def __len__(self) -> int:
        return len(self._searches)

    @property
    def pins(self) -> int:
        """Blocks pinned for all of them; one that several want counts as often."""
        return sum(search.pins for _, search in self._searches.values())

    def prepare(
        self, owner: object, around: Surroundings, asked: Prepare, keys: Sequence[bytes], block_tokens: int
    ) -> Pending | Accepted | Nothing:
        """Begins a search for `owner`, or says again what was decided. The same id with other blocks is another one."""
        _, search = self._searches.get(asked.request, (None, None))
        if search is None or search.asked != asked:
            self.cancel(asked.request)
            if not keys:
                return Nothing(reason="no_blocks")
            if len(self._searches) >= MAX_SEARCHES:
                return Nothing(reason="too_many")
            search = Search(self._desk, around, asked, keys, block_tokens)
            self._searches[asked.request] = owner, search
        return self._told(asked.request, search, search.decision())

    async def poll(self, request: str, wait_s: float = 0.0) -> Pending | Accepted | Loading | Ready | Nothing:
        """How far the search is. As long as it is undecided, or loading, that is told after `wait_s`, or when it is so
        no more."""
        _, search = self._searches.get(request, (None, None))
        if search is None:
            return Nothing(reason="unknown")
        answer = search.progress()
        if wait_s > 0 and isinstance(answer, Pending | Loading):
            await search.news(min(wait_s, MAX_WAIT_S))
            answer = search.progress()
        return self._told(request, search, answer)

    def _told(self, request: str, search: Search, answer: _A) -> _A:
        # It may be another one's turn already, where the answer was waited for.
        if search.state is State.OVER and self._searches.get(request, (None, None))[1] is search:
            del self._searches[request]
        return answer

    def release(self, done: Release, rank: int | None = None) -> None:
        """The engine's `rank` needs nothing more; None: no rank does."""
        _, search = self._searches.get(done.request, (None, None))
        if search is not None:
            if search.state is not State.OVER:
                search.release(done, rank)
            if search.state is State.OVER:
                del self._searches[done.request]

    def cancel(self, request: str) -> None:
        """The request ended, or is computed after all."""
        _, search = self._searches.pop(request, (None, None))
        if search is not None:
            search.end("cancelled")

    def failed(self, failed: Failed) -> None:
        """Blocks that the engine had counted as cached were not loaded."""
        _, search = self._searches.get(failed.request, (None, None))
        if search is not None:
            search.failed(failed.blocks)

    def drop(self, owner: object) -> None:
        """The connection of `owner` is gone."""
        for request, (its, _) in list(self._searches.items()):
            if its is owner:
                self._searches.pop(request)[1].end("engine_gone")

    def end_all(self, reason: str) -> None:
        """Every search is over; engines are told when they ask next."""
        for _, search in self._searches.values():
            search.end(reason)

    def expire(self) -> None:
        """Forgets what nobody has asked about for too long."""
        now = self._desk.clock()
        for request, (_, search) in list(self._searches.items()):
            if now > search.deadline + GRACE_S:
                self._searches.pop(request)[1].end("abandoned")

    def check(self) -> None:
        """Asserts what holds for each search."""
        assert len(self._searches) <= MAX_SEARCHES
        for _, search in self._searches.values():
            search.check()

"""The connector in vLLM's scheduler: what is sought, what is loaded, what is saved."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec

from kvstore.engine_messages import DECISION_S
from kvstore.errors import HintRefused
from kvstore.hint import NAME, Hint
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.vllm.asker import Asker, Search
from replica_agent.engines.vllm.step import Cleared, LoadOrder, Prefill, SaveOrder, Step

INLINE_S = 0.002
"""For the agent's decision within one pass of the scheduler, over all requests: most come in less, and every later one
costs the request a step."""

IDLE_S = DECISION_S
"""The same while the engine has nothing to compute. Steps of nothing, one after the other, would take the cores that
the agents need to answer: on a host with few, leases came too late."""


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_preemptions: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: object | None


class Scheduled(NamedTuple):
    """A request's part in a step: `tokens` are computed after the first `computed`.

    `blocks` are all of its blocks where it is admitted `anew`, otherwise those that are added.
    """

    request: str
    blocks: Sequence[int]
    anew: bool
    computed: int
    tokens: int


class _Course:
    """One request, from its first admission to its end."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: list[int] = []
        self.kept = 0
        """Blocks, from the first on, that need no more thought: saved, or not to be."""
        self.search: Search | None = None
        self.searches = 0
        self.clears = 0
        """Of the engine's, when the search began."""
        self.preemptions = 0
        self.settled = False
        """Nothing more is sought for this admission."""
        self.offer = (0, 0)
        """Blocks that vLLM was told it could have: from, to."""


class SchedulerSide:
    """Owns every request's search and block table, and for each block of the cache under which connection it was last
    offered to the agent. Used by the scheduler's thread; nothing in it waits longer than INLINE_S in one pass, or
    IDLE_S where no request is computed.

    vLLM asks again and again for the same request; the answer is "later" for DECISION_S at most, then what was found,
    then always the same until the request is preempted. Blocks that the prefix cache holds are offered once for each
    connection to the agent: an agent that was restarted gets them back when they are next used.
    """

    def __init__(
        self,
        link: PoolLink,
        *,
        block_size: int,
        blocks: int,
        ranks: int,
        loads: bool,
        resets: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resets` counts how often vLLM dropped its prefix cache; without `loads` nothing is sought."""
        self._link = link
        self._size = block_size
        self._ranks = ranks
        self._loads = loads
        self._resets = resets
        self._reset_here = 0
        self._clock = clock
        self._asker = Asker(link, self._count_clears, clock)
        self._courses: dict[str, _Course] = {}
        self._orders: list[LoadOrder] = []
        self._fresh: list[int] = []
        self._inline_s = INLINE_S
        self._cleared: dict[int, int] = {}
        self._clears = 0
        self._client: weakref.ref[PoolClient] | None = None
        self._epoch = 0
        self._offered = [0] * blocks

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be loaded, and whether that goes on beside the steps; None: ask later."""
        course = self._course(request)
        if request.num_preemptions != course.preemptions:
            # Resumed: its blocks are gone, what was found before is out of date.
            self._drop_search(course)
            course.preemptions = request.num_preemptions
            course.settled = False
        if course.search is not None and course.clears != self._count_clears():
            # Found before the engine was reset: of its old weights, perhaps.
            self._drop_search(course)
        first = computed // self._size
        for _ in range(2):
            if course.settled:
                break
            search = course.search
            if search is None:
                search = course.search = self._seek(course, first)
                if search is None:
                    break
            if search.found is None:
                self._wait_inline(search)
            if search.found is None:
                if self._clock() < search.until:
                    return None, False
                break
            if not search.found:
                break
            end = search.cached + search.found
            if search.cached <= first and self._clock() < search.until:
                if first >= end:
                    break
                course.offer = (first, end)
                return (end - first) * self._size, True
            # There was no room for too long, or blocks before it were evicted meanwhile: another search.
            self._drop_search(course)
        self._drop_search(course)
        course.settled = True
        return 0, False

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """vLLM has allocated a request's blocks; `external` tokens of them are to be loaded."""
        course = self._course(request)
        search = course.search
        if external and search is not None:
            self._look_at_link()
            first, _ = course.offer
            targets = list(blocks[first : first + external // self._size])
            self._orders.append(
                LoadOrder(request.request_id, search.name, targets, first - search.cached, search.until)
            )
            self._fresh += targets
            self._asker.forget(search)
            course.search = None
            for block in targets:
                self._offered[block] = self._epoch
        else:
            self._drop_search(course)
        course.settled = True

    def step(self, scheduled: Iterable[Scheduled]) -> Step:
        """What the ranks are to do with this step."""
        self._look_at_link()
        step = Step(clears=self._look_at_clears(), loads=self._orders, fresh=self._fresh)
        self._orders, self._fresh = [], []
        tokens = attended = decodes = 0
        for part in scheduled:
            tokens += part.tokens
            attended += part.tokens * part.computed + part.tokens * (part.tokens + 1) // 2
            decodes += part.tokens == 1
            course = self._courses.get(part.request)
            if course is None:
                continue
            if part.anew:
                course.blocks = list(part.blocks)
                course.kept = 0
                fresh = course.blocks[part.computed // self._size :]
            else:
                course.blocks += part.blocks
                fresh = list(part.blocks)
            for block in fresh:
                self._offered[block] = -1
            step.fresh += fresh
            if self._shares(course.request):
                step.saves += self._saves(course, part.computed + part.tokens)
        # As in a step with more decodes their share of reading the weights would count as prefill's.
        if tokens and 16 * decodes <= tokens:
            step.prefill = Prefill(tokens, attended)
        step.idle = not tokens
        self._inline_s = IDLE_S if step.idle else INLINE_S
        return step

    def confirmed(self, cleared: Cleared) -> None:
        """Ranks have told the agent of clears."""
        self._cleared |= cleared.ranks

    def clear(self) -> None:
        """Nothing saved so far may be served any more."""
        self._reset_here += 1

    def finished(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        course = self._courses.pop(request.request_id, None)
        if course is not None:
            self._drop_search(course)

    def close(self) -> None:
        """Disconnect, and end the thread."""
        self._link.close()
        self._asker.close()

    def check(self) -> None:
        """Asserts that every search belongs to a request, and that no table is longer than what is kept of it says."""
        searches = [course.search for course in self._courses.values() if course.search is not None]
        assert len(self._asker) <= len(searches), f"{len(self._asker)} searches of {len(searches)} requests"
        for course in self._courses.values():
            assert course.kept <= len(course.blocks), "more blocks are kept than there are"

    def _course(self, request: Request) -> _Course:
        course = self._courses.get(request.request_id)
        if course is None:
            course = self._courses[request.request_id] = _Course(request)
        return course

    def _shares(self, request: Request) -> bool:
        """Whether its blocks may be exchanged: an adapter's weights have no name that other engines agree on, and the
        tokens of a session that goes on may still be taken back."""
        return request.lora_request is None and not getattr(request, "resumable", False)

    def _seek(self, course: _Course, first: int) -> Search | None:
        request, client = course.request, self._link.client
        wanted = self._loads and self._shares(request) and not getattr(request, "skip_reading_prefix_cache", False)
        # The last token is always computed, because its logits are wanted.
        keys = request.block_hashes[first : (request.num_tokens - 1) // self._size]
        if client is None or not wanted or not keys or self._uncleared:
            return None
        name = request.request_id if not course.searches else f"{request.request_id}~{course.searches}"
        course.searches += 1
        course.clears = self._count_clears()
        hint = _hint(request.kv_transfer_params)
        until = self._clock() + DECISION_S
        search = Search(name, list(keys), first, request.num_tokens, hint, client, until)
        self._asker.ask(search)
        return search

    def _wait_inline(self, search: Search) -> None:
        if self._inline_s > 0:
            began = self._clock()
            search.decided.wait(self._inline_s)
            self._inline_s -= self._clock() - began

    def _drop_search(self, course: _Course) -> None:
        search, course.search = course.search, None
        if search is not None:
            self._asker.cancel(search)

    def _saves(self, course: _Course, computed: int) -> Iterator[SaveOrder]:
        """Blocks that are full after this step, and have not been offered under this connection. Those whose hash is
        not known yet, because their last token is only being sampled, come with a later step."""
        blocks, keys = course.blocks, course.request.block_hashes
        full = min(computed // self._size, len(keys), len(blocks))
        if full <= course.kept:
            return
        if self._client is not None:
            new = [index for index in range(course.kept, full) if self._offered[blocks[index]] != self._epoch]
            for _, group in groupby(enumerate(new), lambda pair: pair[1] - pair[0]):
                run = [index for _, index in group]
                first, end = run[0], run[-1] + 1
                for block in blocks[first:end]:
                    self._offered[block] = self._epoch
                yield SaveOrder(blocks[first:end], list(keys[first:end]), keys[first - 1] if first else b"")
        course.kept = full

    def _look_at_link(self) -> None:
        """Another connection is another pool, for all that is known here."""
        client = self._link.client
        if client is None:
            self._client = None
        elif self._client is None or self._client() is not client:
            self._client = weakref.ref(client)
            self._epoch += 1

    def _count_clears(self) -> int:
        return self._resets() + self._reset_here

    def _look_at_clears(self) -> int:
        clears = self._count_clears()
        if clears != self._clears:
            self._clears = clears
            self._epoch += 1
        return clears

    @property
    def _uncleared(self) -> bool:
        """Whether the agent may still serve what has been cleared: some rank may be saving it right now."""
        clears = self._count_clears()
        return clears > 0 and (
            self._asker.cleared < clears or any(self._cleared.get(rank, 0) < clears for rank in range(self._ranks))
        )


def _hint(params: dict[str, Any] | None) -> Hint | None:
    """The gateway's hint among what came with a request; None where there is none, or none that makes sense."""
    told = params.get(NAME) if isinstance(params, dict) else None
    if told is None:
        return None
    try:
        return msgspec.convert(told, Hint)
    except (msgspec.ValidationError, HintRefused):
        return None

"""What to compute next: continuous batching with chunked prefill, preemption by recompute, blocks from elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from replica_agent.reference.block_pool import BlockPool
from replica_agent.reference.connector import Connector, Saving, Search
from replica_agent.reference.sequence import Sequence


class Work(NamedTuple):
    """The next `tokens` uncomputed tokens of a sequence, to be computed in this step."""

    sequence: Sequence
    tokens: int


class Scheduler:
    """Owns the waiting queue, the running list and all sequences' block tables; the compute thread alone may call it.

    `running` is in order of admission. Decodes come first; what they leave of the step's token budget goes to prefills,
    first come first served. A sequence is admitted only when the blocks of its whole prompt are free, so that two
    half-computed prompts never wait for each other. When a decode finds no block, the youngest running sequence is
    preempted and waits at the front; the oldest always goes on, and any sequence fits alone, so each one ends.

    With a connector, blocks of a sequence whose turn has come are first sought outside the engine. Until that is
    decided others may pass it; what is found is loaded into blocks of its own while others are computed. Both end at
    the search's deadline, whatever the connector does; what has not been loaded by then is computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        step_tokens: int,
        max_sequences: int,
        connector: Connector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._connector = connector
        self._clock = clock
        self._now = clock()
        self.step_tokens = step_tokens
        # Never more decodes than a step has tokens: none would be left for prefill.
        self.max_sequences = min(max_sequences, step_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.loaded_blocks = 0
        self.failed_blocks = 0
        """Blocks that were found outside and did not come."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits (prompt and max_tokens within the pool and the model's context)."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Admit, allocate and choose this step's work; [] when there is none. Pass it to `commit` when computed."""
        now = self._now = self._clock()
        for sequence in self.running:
            if sequence.search is not None and (sequence.search.done or now >= sequence.search.deadline):
                self._take_loaded(sequence)
        work = []
        for sequence in list(self.running):
            # One without blocks has just been preempted for an older one, which came before it in this loop.
            if sequence.decoding and sequence.blocks and self._grow(sequence):
                work.append(Work(sequence, 1))
        budget = self.step_tokens - len(work)
        for sequence in self.running:
            if budget and not sequence.decoding and sequence.search is None:
                count = min(budget, sequence.missing)
                work.append(Work(sequence, count))
                budget -= count
        undecided = 0
        for sequence in list(self.waiting):
            full = len(self.running) + undecided >= self.max_sequences
            # A loaded one takes no part of the budget, so it is worth a look when that is used up.
            if full or not (budget or sequence.search or (self._connector and not sequence.sought)):
                break
            hits = self.pool.lookup(self._hashes(sequence))
            if not self._fits(sequence, hits):
                break
            if self._undecided(sequence, len(hits)):
                undecided += 1
            elif budget or sequence.search:
                self._admit(sequence, hits)
                if budget and sequence.search is None:
                    count = min(budget, sequence.missing)
                    work.append(Work(sequence, count))
                    budget -= count
            else:
                break
        return work

    def wake_at(self) -> float | None:
        """When `schedule` must be called again after one that found no work; None when only something new brings any.

        Deadlines that it has seen pass count no more: what they belong to waits for others.
        """
        searches = [sequence.search for sequence in (*self.running, *self.waiting) if sequence.search]
        return min((search.deadline for search in searches if search.deadline > self._now), default=None)

    def commit(self, work: list[Work]) -> list[Sequence]:
        """Record computed work and store newly full blocks. Returns the sequences that now need a token, in order."""
        size = self.pool.block_size
        ready = []
        for sequence, tokens in work:
            sequence.computed += tokens
            full = sequence.computed // size
            if full > sequence.stored and sequence.generation == self.pool.generation:
                contents = sequence.contents(size)[sequence.stored : full]
                blocks = sequence.blocks[sequence.stored : full]
                self.pool.store(blocks, contents, sequence.salt)
                if self._connector is not None:
                    self._connector.save(Saving(blocks, [self.pool.versions[block] for block in blocks], contents))
            sequence.stored = full
            if sequence.missing == 0:
                ready.append(sequence)
        return ready

    def finish(self, sequence: Sequence) -> None:
        """Forget a running or waiting sequence and release what it holds; one that is neither is left alone."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._end_search(sequence)

    def clear(self) -> None:
        """Forget all that is reusable, here and outside. What is being loaded is computed instead."""
        for sequence in (*self.running, *self.waiting):
            if self._end_search(sequence) is not None and sequence.blocks:
                self._count(sequence)
        self.pool.clear()
        if self._connector is not None:
            self._connector.clear()

    @property
    def used_blocks(self) -> int:
        """Blocks in use by running sequences, shared ones once."""
        return self.pool.num_blocks - self.pool.free

    def queued_prefill_tokens(self) -> int:
        """Prompt tokens still to be computed, of running and waiting sequences, less what is cached or being loaded."""
        size = self.pool.block_size
        queued = 0
        for sequence in self.running:
            if not sequence.decoding:
                loading = sequence.search.blocks if sequence.search else None
                queued += sequence.missing - size * len(loading or ())
        for sequence in self.waiting:
            queued += sequence.missing - size * len(self.pool.lookup(self._hashes(sequence)))
        return queued

    def check(self) -> None:
        """Conservation: the pool's references are exactly the running sequences' tables.

        Each table is as long as it must be, holds no block twice, and its stored part holds what its sequence says. The
        blocks that are loaded into follow the stored part, and are nobody else's.
        """
        self.pool.check()
        held: dict[int, int] = {}
        for sequence in self.running:
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
            needed = -(-max(sequence.computed, sequence.prompt_length) // self.pool.block_size)
            assert len(sequence.blocks) >= needed, f"{len(sequence.blocks)} blocks for {needed}"
            assert len(set(sequence.blocks)) == len(sequence.blocks), "a table holds a block twice"
            if sequence.generation == self.pool.generation:
                stored = [self.pool.content(block) for block in sequence.blocks[: sequence.stored]]
                assert stored == sequence.contents(self.pool.block_size)[: sequence.stored], (
                    "a block holds other tokens"
                )
            if sequence.search is not None:
                loading = list(sequence.search.blocks or ())
                after = sequence.blocks[sequence.stored : sequence.stored + len(loading)]
                assert loading and loading == after, f"{loading} are loaded into, {after} follow"
                assert sequence.search.loaded <= len(loading) <= (sequence.search.found or 0), "more loaded than found"
                assert sequence.computed == sequence.stored * self.pool.block_size, "computed while it is loaded"
                for block in loading:
                    assert self.pool.content(block) is None, f"block {block} is loaded into and reusable"
                    assert self.pool.references()[block] == 1, f"block {block} is loaded into and shared"
        for sequence in self.waiting:
            assert sequence.search is None or sequence.search.blocks is None, "a waiting sequence is loaded"
            assert not sequence.blocks, "a waiting sequence holds blocks"
            assert sequence.computed == 0, "a waiting sequence counts computed tokens"
        assert len(held) == self.used_blocks, f"{len(held)} blocks in tables, {self.used_blocks} in use"
        references = self.pool.references()
        assert all(references[block] == count for block, count in held.items()), "references and tables differ"

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        # The last token is always computed, because its logits are wanted: so a fully cached prompt's last block is
        # computed again, into a block of its own.
        size = self.pool.block_size
        reusable = (len(sequence.tokens) - 1) // size
        return [content.hash for content in sequence.contents(size)[:reusable]]

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        return self._missing_blocks(sequence, hits) + self.pool.idle(hits) <= self.pool.free

    def _missing_blocks(self, sequence: Sequence, hits: list[int]) -> int:
        return -(-len(sequence.tokens) // self.pool.block_size) - len(hits)

    def _undecided(self, sequence: Sequence, cached: int) -> bool:
        """Whether to wait with a sequence because it is sought outside, which is begun here when its turn has come."""
        if self._connector is not None and not sequence.sought:
            sequence.sought = True
            keys = self._hashes(sequence)[cached:]
            if keys and sequence.request:
                sequence.search = self._connector.seek(
                    sequence.request, keys, cached, len(sequence.tokens), sequence.hint
                )
        search = sequence.search
        if search is None:
            return False
        found = search.found
        if found is None and self._now < search.deadline:
            return True
        if not found:
            self._end_search(sequence)
        return False

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        # Acquired before allocating, which could otherwise evict the very blocks that were hit.
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(self._missing_blocks(sequence, hits))
        sequence.computed = len(hits) * self.pool.block_size
        sequence.stored = len(hits)
        sequence.generation = self.pool.generation
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.search is not None and self._connector is not None:
            if sequence.search.load(sequence.blocks, len(hits)):
                self._connector.settle()
            else:
                self._end_search(sequence)
        if sequence.search is None:
            self._count(sequence)

    def _take_loaded(self, sequence: Sequence) -> None:
        """End a running sequence's load: what has come is as good as computed, the rest will be computed."""
        search = self._end_search(sequence)
        assert search is not None and search.blocks is not None
        first, full = sequence.stored, sequence.stored + search.loaded
        self.pool.store(sequence.blocks[first:full], sequence.contents(self.pool.block_size)[first:full], sequence.salt)
        sequence.stored = full
        sequence.computed = full * self.pool.block_size
        self.loaded_blocks += search.loaded
        self.failed_blocks += len(search.blocks) - search.loaded
        self._count(sequence)

    def _end_search(self, sequence: Sequence) -> Search | None:
        """After this no block of the sequence is written by anybody but the model."""
        search, sequence.search = sequence.search, None
        if search is not None:
            search.end()
            assert self._connector is not None
            self._connector.settle()
        return search

    def _count(self, sequence: Sequence) -> None:
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.queried_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.computed

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token, preempting the youngest if need be; False when that was `sequence` itself."""
        if len(sequence.tokens) <= len(sequence.blocks) * self.pool.block_size:
            return True
        while self.pool.free == 0:
            victim = self.running.pop()
            self._release(victim)
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1)
        return True

    def _release(self, sequence: Sequence) -> None:
        self._end_search(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.sought = False
        sequence.computed = sequence.stored = 0

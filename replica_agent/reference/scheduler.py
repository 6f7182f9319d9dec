"""What to compute next: continuous batching with chunked prefill, and preemption by recompute."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from replica_agent.reference.block_pool import BlockPool
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
    """

    def __init__(self, pool: BlockPool, step_tokens: int, max_sequences: int) -> None:
        self.pool = pool
        self.step_tokens = step_tokens
        # Never more decodes than a step has tokens: none would be left for prefill.
        self.max_sequences = min(max_sequences, step_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.queried_tokens = 0
        self.hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits (prompt and max_tokens within the pool and the model's context)."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Admit, allocate and choose this step's work; [] when there is none. Pass it to `commit` when computed."""
        work = []
        for sequence in list(self.running):
            # One without blocks has just been preempted for an older one, which came before it in this loop.
            if sequence.decoding and sequence.blocks and self._grow(sequence):
                work.append(Work(sequence, 1))
        budget = self.step_tokens - len(work)
        for sequence in self.running:
            if budget and not sequence.decoding:
                count = min(budget, sequence.missing)
                work.append(Work(sequence, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.max_sequences and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            count = min(budget, sequence.missing)
            work.append(Work(sequence, count))
            budget -= count
        return work

    def commit(self, work: list[Work]) -> list[Sequence]:
        """Record computed work and store newly full blocks. Returns the sequences that now need a token, in order."""
        size = self.pool.block_size
        ready = []
        for sequence, tokens in work:
            sequence.computed += tokens
            full = sequence.computed // size
            if full > sequence.stored and sequence.generation == self.pool.generation:
                contents = sequence.contents(size)[sequence.stored : full]
                self.pool.store(sequence.blocks[sequence.stored : full], contents, sequence.salt)
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

    @property
    def used_blocks(self) -> int:
        """Blocks in use by running sequences, shared ones once."""
        return self.pool.num_blocks - self.pool.free

    def queued_prefill_tokens(self) -> int:
        """Prompt tokens still to be computed, of running and waiting sequences, less what is cached now."""
        size = self.pool.block_size
        queued = sum(sequence.missing for sequence in self.running if not sequence.decoding)
        for sequence in self.waiting:
            queued += sequence.missing - size * len(self.pool.lookup(self._hashes(sequence)))
        return queued

    def check(self) -> None:
        """Conservation: the pool's references are exactly the running sequences' tables.

        Each table is as long as it must be, holds no block twice, and its stored part holds what its sequence says.
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
        for sequence in self.waiting:
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

    def _admit(self, sequence: Sequence) -> bool:
        hits = self.pool.lookup(self._hashes(sequence))
        new = -(-len(sequence.tokens) // self.pool.block_size) - len(hits)
        if new + self.pool.idle(hits) > self.pool.free:
            return False
        # Acquired before allocating, which could otherwise evict the very blocks that were hit.
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(new)
        sequence.computed = len(hits) * self.pool.block_size
        sequence.stored = len(hits)
        sequence.generation = self.pool.generation
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.queried_tokens += len(sequence.tokens)
            self.hit_tokens += sequence.computed
        return True

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
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.stored = 0

"""vLLM's scheduler and its workers, in the few rules that a connector lives by: a step at a time, one thread.

A block's bytes follow from its key, so every block that a request builds on can be checked: computed here, hit in the
prefix cache, or loaded by the connector.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm_support import SIZE, Rank, Request, facts, keys_of, link_to, rank_of

from replica_agent.engines.vllm.scheduler_side import Scheduled, SchedulerSide
from replica_agent.engines.vllm.step import Step
from replica_agent.engines.vllm.worker_side import WorkerSide


@dataclass(eq=False)
class Job:
    """A request and where it is."""

    request: Request
    left: int
    """Tokens to generate."""
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    pending: int = 0
    """Ranks that have not reported its load."""


class TwinEngine:
    """Owns requests, blocks, their prefix cache, and both sides of the connector. As vLLM schedules one step ahead,
    what a step brings (tokens, finished loads) is known to the scheduler after it has made the next step."""

    def __init__(self, socket: Path, *, life: str, tp: int, blocks: int, budget: int) -> None:
        self.tp = tp
        self.budget = budget
        self.resets = 0
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.ranks: list[Rank] = []
        self.workers: list[WorkerSide] = []
        for rank in range(tp):
            engine = facts(socket, engine_id=life, tp=tp, rank=rank, blocks=blocks)
            made = rank_of(engine)
            self.ranks.append(made)
            self.workers.append(
                WorkerSide(
                    link_to(socket, engine),
                    made.cache,
                    torch.device("cpu"),
                    rank=rank,
                    blocks=blocks,
                    writes=engine.share.primary,
                    observes=rank == 0,
                )
            )
        self.scheduler = SchedulerSide(
            link_to(socket, facts(socket, engine_id=life, tp=tp, blocks=blocks), role="scheduler"),
            block_size=SIZE,
            blocks=blocks,
            ranks=tp,
            loads=True,
            resets=lambda: self.resets,
        )
        self.free: deque[int] = deque(range(blocks))
        self.users = [0] * blocks
        self.name_of: dict[int, bytes] = {}
        self.index: dict[bytes, int] = {}
        self.ended: set[str] = set()
        self.outputs: deque[tuple[list[tuple[Job, int]], list[set[str]], set[int]]] = deque()
        self.done = self.loaded_tokens = self.failed_loads = self.preempted = 0

    def add(self, name: str, prompt: list[int], generate: int) -> None:
        job = self.jobs[name] = Job(Request(name, list(prompt)), generate)
        self.waiting.append(job)

    def abort(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is not None and job.state != "ended":
            self._end(job)

    def preempt(self) -> None:
        """The youngest running request."""
        if self.running:
            job = self.running.pop()
            self._release(job)
            job.state, job.computed = "waiting", 0
            job.request.num_preemptions += 1
            self.waiting.appendleft(job)
            self.preempted += 1

    def reset(self) -> bool:
        """Forget the prefix cache, where nobody uses a block."""
        if any(self.users):
            return False
        self.index.clear()
        self.name_of.clear()
        self.resets += 1
        return True

    def step(self) -> None:
        """Make a step, compute it, and take in what the one before it has brought."""
        parts, jobs = self._schedule()
        step = self.scheduler.step(parts)
        ended, self.ended = self.ended, set()
        finished, failed = [], set()
        for rank, worker in zip(self.ranks, self.workers, strict=True):
            worker.begin(step)
            self._compute(rank, jobs)
            worker.end(step)
            finished.append(worker.finished(ended))
            failed |= worker.failed()
            if (told := worker.cleared()) is not None:
                self.scheduler.confirmed(told)
            worker.check()
        self.outputs.append(([(job, tokens) for job, tokens in jobs], finished, failed))
        if len(self.outputs) > 1:
            self._update(*self.outputs.popleft())
        self.scheduler.check()
        self.check(step)
        if not jobs:
            time.sleep(0.0005)

    def check(self, step: Step) -> None:
        """Conservation: blocks are used by those who have them, and every load that is reported was under way."""
        users = [0] * len(self.users)
        for job in self.jobs.values():
            for block in job.blocks:
                users[block] += 1
        assert users == self.users
        assert all((count == 0) == (block in set(self.free)) for block, count in enumerate(users))
        for save in step.saves:
            assert [self.name_of.get(block) for block in save.blocks] == save.keys, "saved as what it is not"

    def close(self) -> None:
        for side in (self.scheduler, *self.workers):
            side.close()

    # As vLLM's scheduler.

    def _schedule(self) -> tuple[list[Scheduled], list[tuple[Job, int]]]:
        parts: list[Scheduled] = []
        jobs: list[tuple[Job, int]] = []
        budget = self.budget
        for job in list(self.running):
            tokens = min(budget, job.request.num_tokens + self._in_flight(job) - job.computed)
            if tokens > 0 and job in self.running:
                new = self._grow(job, job.computed + tokens)
                if new is None:
                    self.preempt()
                    continue
                parts.append(Scheduled(job.request.request_id, new, False, job.computed, tokens))
                jobs.append((job, tokens))
                budget -= tokens
        skipped: list[Job] = []
        while budget and self.waiting and len(self.running) < 6:
            job = self.waiting.popleft()
            request = job.request
            if job.state == "loading":
                skipped.append(job)
                continue
            anew = job.computed == 0
            external = 0
            if anew:
                hits = self._hits(request)
                found, beside = self.scheduler.matched(request, len(hits) * SIZE)
                if found is None:
                    skipped.append(job)
                    continue
                external = found
                assert beside == bool(external)
                assert len(hits) * SIZE + external < request.num_tokens
                job.cached = len(hits) * SIZE + external
                need = job.cached if external else min(request.num_tokens, job.cached + budget)
                if -(-need // SIZE) - len(hits) > len(self.free) - sum(not self.users[hit] for hit in hits):
                    skipped.append(job)
                    break
                for hit in hits:
                    self._use(hit)
                job.blocks = hits
                job.computed = len(hits) * SIZE
            if external:
                assert self._grow(job, job.cached) is not None
                self.scheduler.allocated(request, list(job.blocks), external)
                job.state, job.pending = "loading", self.tp
                job.computed = job.cached
                self.loaded_tokens += external
                skipped.append(job)
                continue
            tokens = min(budget, request.num_tokens - job.computed)
            if self._grow(job, job.computed + tokens) is None:
                if anew:
                    self._release(job)
                    job.computed = 0
                skipped.append(job)
                break
            self.scheduler.allocated(request, list(job.blocks), 0)
            job.state = "running"
            self.running.append(job)
            parts.append(Scheduled(request.request_id, list(job.blocks), True, job.computed, tokens))
            jobs.append((job, tokens))
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))
        for job, tokens in jobs:
            job.computed += tokens
            self._name(job)
        return parts, [(job, tokens) for job, tokens in jobs if job.state == "running"]

    def _in_flight(self, job: Job) -> int:
        """A token that is being sampled by the step under way may be computed on by the next, unseen."""
        whole = job.computed >= job.request.num_tokens
        return int(whole and any(each is job for each, _ in self.outputs[-1][0]) if self.outputs else False)

    def _update(self, jobs: list[tuple[Job, int]], finished: list[set[str]], failed: set[int]) -> None:
        for job in list(self.waiting):
            if job.state == "loading":
                bad = [at for at, block in enumerate(job.blocks) if block in failed]
                if bad:
                    self.failed_loads += 1
                    job.computed = min(job.computed, bad[0] * SIZE)
        for name in [name for rank in finished for name in rank]:
            job = self.jobs[name]
            assert job.pending > 0, "a load is reported that was not under way"
            job.pending -= 1
            if job.pending:
                continue
            if job.state == "ended":
                self._release(job)
                del self.jobs[name]
                continue
            job.state = "waiting"
            if job.computed:
                self._name(job)
            else:
                self._release(job)
        for job, _ in jobs:
            if job.state == "running" and job.computed >= job.request.num_tokens:
                job.request.tokens.append(len(job.request.tokens) % 7)
                job.request.block_hashes = keys_of(job.request.tokens)
                job.left -= 1
                self._name(job)
                if job.left <= 0:
                    self.done += 1
                    self._end(job)

    def _end(self, job: Job) -> None:
        name = job.request.request_id
        self.scheduler.finished(job.request)
        self.ended.add(name)
        if job in self.running:
            self.running.remove(job)
        if job in self.waiting:
            self.waiting.remove(job)
        loading = job.state == "loading"
        job.state = "ended"
        if not loading:
            self._release(job)
            del self.jobs[name]

    # Blocks.

    def _hits(self, request: Request) -> list[int]:
        hits = []
        for key in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
            block = self.index.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _use(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def _grow(self, job: Job, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; the new ones, or None when there are not enough."""
        count = -(-tokens // SIZE) - len(job.blocks)
        if count > len(self.free):
            return None
        new = [self.free.popleft() for _ in range(count)]
        for block in new:
            self.users[block] = 1
            key = self.name_of.pop(block, None)
            if key is not None and self.index.get(key) == block:
                del self.index[key]
        job.blocks += new
        return new

    def _release(self, job: Job) -> None:
        for block in reversed(job.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        job.blocks = []

    def _name(self, job: Job) -> None:
        """Full blocks can be hit, also in the step that computes them."""
        full = min(job.computed, job.request.num_tokens) // SIZE
        for block, key in zip(job.blocks[:full], job.request.block_hashes, strict=False):
            self.name_of.setdefault(block, key)
            self.index.setdefault(key, block)

    # As vLLM's worker.

    def _compute(self, rank: Rank, jobs: list[tuple[Job, int]]) -> None:
        for job, tokens in jobs:
            # The worker knows the token that the scheduler does not know yet.
            known = job.request.tokens + [at % 7 for at in range(job.request.num_tokens, job.computed)]
            keys = keys_of(known)
            first = (job.computed - tokens) // SIZE
            for at in range(first):
                assert rank.holds(job.blocks[at], keys[at]), f"{job.request.request_id}: block {at} is wrong"
            for at in range(first, -(-job.computed // SIZE)):
                if at < len(keys):
                    rank.compute(job.blocks[at], keys[at])
                else:
                    for cache in rank.caches:
                        cache[job.blocks[at]] = float(at)

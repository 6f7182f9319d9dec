"""The connector in one of vLLM's workers: a rank's blocks to and from the agent's slots."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.saver import Saver, Saving
from replica_agent.engines.vllm.loads import Finished, Loads
from replica_agent.engines.vllm.moment import Moment, now_on
from replica_agent.engines.vllm.paged_cache import PagedCache
from replica_agent.engines.vllm.step import Cleared, Step
from replica_agent.engines.vllm.tally import Tally

IDLE_S = 0.005
"""That a step of nothing waits for a load: the engine has nothing to do but to ask again, and takes cores for it that
loading needs. A request that comes meanwhile waits as long."""


class WorkerSide:
    """Owns a rank's link to the agent, the versions of its blocks, its saver and its loads. Used by the thread that
    runs the engine's steps, each of which is `begin`, `end`, `finished`; none of them waits for the agent, or for more
    than one block's copy."""

    def __init__(
        self,
        link: PoolLink,
        cache: PagedCache,
        device: torch.device,
        *,
        rank: int,
        blocks: int,
        writes: bool,
        observes: bool,
    ) -> None:
        """The cache has `blocks`. The rank `writes` its share where no other one does, and `observes` what prefill
        costs where it computes all layers."""
        self._link = link
        self._rank = rank
        self._device = device
        self._writes = writes
        self._observes = observes
        self._versions = [0] * blocks
        with _beside_the_computing(device):
            self._saver = Saver(link, cache.read, self._versions)
            self._loads = Loads(cache, reports=rank == 0)
        self._tally = Tally()
        self._told = 0
        self._began: Moment | None = None
        self._failed: set[int] = set()
        self._idle = False

    def begin(self, step: Step) -> None:
        """Before anything is computed, or any block written."""
        with self._timed():
            for block in step.fresh:
                self._versions[block] += 1
            if step.clears != self._saver.clears:
                # What is being copied right now is not to become visible, either.
                self._versions[:] = [version + 1 for version in self._versions]
                self._saver.clear(step.clears)
            if step.prefill is not None and self._observes:
                self._began = now_on(self._device)

    def end(self, step: Step) -> None:
        """When the step has been given to the device."""
        self._idle = step.idle
        with self._timed():
            began, self._began = self._began, None
            if began is None and not step.loads and not (step.saves and self._writes):
                return
            now = now_on(self._device)
            if step.loads:
                self._loads.start(step.loads, self._link.client, now)
            if began is not None and step.prefill is not None:
                self._saver.observe(step.prefill.tokens, step.prefill.attended, partial(_between, began, now))
            if self._writes:
                for blocks, keys, parent in step.saves:
                    self._saver.save(
                        Saving(blocks, [self._versions[block] for block in blocks], keys, parent, now.wait)
                    )

    def finished(self, ended: Collection[str]) -> set[str]:
        """Requests whose loads are over, now that these have `ended`. A step of nothing waits for the first."""
        if self._idle and not ended:
            self._loads.wait(IDLE_S)
        with self._timed():
            finished: Finished = self._loads.take(ended)
            self._failed |= finished.failed
        self._tally.step()
        return finished.requests

    def failed(self) -> set[int]:
        """Blocks of these, and of earlier ones, that were not loaded; each is told once."""
        failed, self._failed = self._failed, set()
        return failed

    def cleared(self) -> Cleared | None:
        """What the scheduler's side is to know."""
        cleared = self._saver.cleared
        if cleared == self._told:
            return None
        self._told = cleared
        return Cleared({self._rank: cleared})

    def told(self) -> dict[str, Any] | None:
        """What `Tally.take` gives."""
        saver, loads = self._saver, self._loads
        return self._tally.take(
            {"saved": saver.saved, "shed": saver.shed, "loaded": loads.loaded, "failed": loads.failed}
        )

    def check(self) -> None:
        """Asserts what its parts do."""
        self._saver.check()
        self._loads.check()

    def close(self) -> None:
        """Disconnect, and end the threads."""
        self._link.close()
        self._saver.close()
        self._loads.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._tally.spent(time.perf_counter() - began)


def _between(began: Moment, ended: Moment) -> float:
    ended.wait()
    return ended.since(began)


@contextmanager
def _beside_the_computing(device: torch.device) -> Iterator[None]:
    """Threads that are started here may run on any core of the engine.

    On a CPU a worker's own thread is tied to the first core that it computes on, and the threads it starts would be.
    """
    own = os.sched_getaffinity(0)
    if device.type == "cpu":
        os.sched_setaffinity(0, own | os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)

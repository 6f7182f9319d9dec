"""What a rank has done for the pool, and what that has cost the engine's steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EVERY_S = 1.0


class Tally:
    """Owns the time that each step has spent on the connector since the last `take`; one thread uses it.

    What it gives away adds up over ranks and over time with `add`: `blocks` are saved, shed, loaded and failed ones,
    `step_ms` is one number a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_ms: list[float] = []
        self._spent = 0.0
        self._before: dict[str, int] = {}
        self._due = clock() + EVERY_S

    def spent(self, seconds: float) -> None:
        """So much of this step was spent here."""
        self._spent += seconds

    def step(self) -> None:
        """The step is over."""
        self._step_ms.append(round(self._spent * 1_000, 4))
        self._spent = 0.0

    def take(self, blocks: dict[str, int]) -> dict[str, Any] | None:
        """What is new, once a second, where anything is; `blocks` are counted from the start."""
        now = self._clock()
        if now < self._due or not self._step_ms:
            return None
        new = {name: count - self._before.get(name, 0) for name, count in blocks.items()}
        told = {"blocks": new, "step_ms": self._step_ms}
        self._due, self._before, self._step_ms = now + EVERY_S, dict(blocks), []
        return told


def add(here: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """Two of what `take` gives, or {}, together."""
    blocks = dict(here.get("blocks", {}))
    for name, count in there.get("blocks", {}).items():
        blocks[name] = blocks.get(name, 0) + count
    return {"blocks": blocks, "step_ms": [*here.get("step_ms", ()), *there.get("step_ms", ())]}


def summary(told: dict[str, Any]) -> dict[str, int | float]:
    """In a line of a log: the blocks, and the median, p99 and most that a step has spent."""
    steps = sorted(told.get("step_ms", ()))
    if not steps:
        return {}
    shares = {"p50": 0.5, "p99": 0.99}
    times = {f"step_ms_{name}": steps[int(share * (len(steps) - 1))] for name, share in shares.items()}
    return {**told["blocks"], "steps": len(steps), **times, "step_ms_max": steps[-1]}

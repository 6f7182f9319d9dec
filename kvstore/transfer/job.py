"""Fetches on threads of their transport: when each has to end, and how the event loop ends it sooner."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from kvstore.transfer.base import Result

DEADLINE = "the deadline has passed"
CANCELLED = "cancelled"


class Job:
    """Owns the answer to "go on?" for one fetch. The event loop stops it, the worker thread asks; a stop is final.

    `interrupt` is set by a worker that may sit in a system call: it wakes it from any thread, and may be called when
    there is nothing left to wake.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.interrupt: Callable[[], None] | None = None
        self._stopped = ""

    def over(self) -> str:
        """Why the job must end now; "" while it may go on."""
        return self._stopped or (DEADLINE if time.monotonic() >= self.deadline else "")

    def remaining(self) -> float:
        """Seconds until the deadline; 0 once the job is over."""
        return 0.0 if self.over() else max(0.0, self.deadline - time.monotonic())

    def stop(self, why: str) -> None:
        """Ends the job: the worker returns at its next step, or out of its system call."""
        self._stopped = self._stopped or why
        # The flag first: a worker that sets `interrupt` after this line looks at the flag once more before it blocks.
        # Looked at once: the worker takes it away when it has ended.
        if (interrupt := self.interrupt) is not None:
            with contextlib.suppress(OSError):
                interrupt()


class Jobs:
    """Owns the jobs of one transport that have not ended yet. Event loop only."""

    def __init__(self) -> None:
        self._running: set[Job] = set()

    @contextlib.contextmanager
    def begin(self, deadline: float) -> Iterator[Job]:
        """A job that can be run until the context ends."""
        job = Job(deadline)
        self._running.add(job)
        try:
            yield job
        finally:
            self._running.discard(job)

    def stop(self) -> None:
        """Ends them all; they are awaited by those who began them."""
        for job in self._running:
            job.stop(CANCELLED)

    def check(self, *, idle: bool = False) -> None:
        """What has ended is not kept. Raises AssertionError; `idle`: also when any still runs."""
        assert not (idle and self._running), f"{len(self._running)} jobs have not ended"


async def run(job: Job, work: asyncio.Future[Result]) -> Result:
    """What the thread's `work` comes to. A caller who is cancelled stops the job and still waits for the thread, so
    that the result says how the targets are; one who is cancelled twice gets the CancelledError instead."""
    timer = asyncio.get_running_loop().call_later(job.remaining(), job.stop, DEADLINE)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        job.stop(CANCELLED)
        return await asyncio.shield(work)
    finally:
        timer.cancel()


def size_error(theirs: int, ours: int) -> str:
    """Why slots of the owner's pitch cannot be moved into ours; "" when they are alike."""
    return "" if theirs == ours else f"the owner's slots have {theirs} bytes, ours {ours}"

"""The queue in front of one identity worker, and the worker's life."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from gateway.errors import IdentityUnavailable
from gateway.identity.process import WorkerDied, WorkerProcess
from gateway.identity.protocol import Failed, Identify, Load, Reply, Request, Unload
from kvstore.messages import ModelFiles

log = logging.getLogger(__name__)

MAX_RESTART_DELAY = 5.0


class Job:
    """A request on its way through a lane. `answer` gets the reply or IdentityUnavailable; cancel it to withdraw."""

    def __init__(self, request: Request, run_seconds: float) -> None:
        self.request = request
        self.run_seconds = run_seconds
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def fail(self, reason: str, message: str) -> None:
        """Ends the job, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(IdentityUnavailable(reason, message))


class Lane:
    """One worker and the jobs that wait for it.

    Owns the worker process and the queue; only the task of `run` touches the process. `files` is the identifier's table
    of models, read whenever a worker is started. A job that runs longer than it may costs the worker its life: jobs
    that wait fail at once, and a new worker is given the models again. A model with which a worker dies while loading
    is put into `broken`, and no worker is given it before the identifier loads it again.
    """

    def __init__(
        self,
        files: Mapping[str, ModelFiles],
        broken: dict[str, str],
        *,
        cache_bytes: int,
        memory_bytes: int,
        load_seconds: float,
        on_kill: Callable[[Identify], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._broken = broken
        self._cache_bytes = cache_bytes
        self._memory_bytes = memory_bytes
        self._load_seconds = load_seconds
        self._on_kill = on_kill
        self._clock = clock
        self._waiting: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._process: WorkerProcess | None = None
        self._ending: asyncio.Task[None] | None = None
        self.live = asyncio.Event()
        self.starts = 0
        self.kills = 0

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if there is one."""
        return self._process.pid if self._process is not None else None

    def submit(self, job: Job) -> None:
        """Queues a job. Raises IdentityUnavailable("restarting") while there is no worker."""
        if not self.live.is_set():
            raise IdentityUnavailable("restarting", "the identity worker is being restarted")
        self._waiting.append(job)
        self._wake.set()

    async def run(self) -> None:
        """Keeps a worker alive and feeds it, until cancelled."""
        delay = 0.0
        try:
            while True:
                began = self._clock()
                try:
                    self._process = await WorkerProcess.start(self._cache_bytes, self._memory_bytes)
                    self.starts += 1
                    await self._load_all(self._process)
                    self.live.set()
                    await self._serve(self._process)
                except (WorkerDied, OSError) as error:
                    await self._lose(f"the identity worker died: {error}")
                except Exception:  # a lane that has died silently is worse than any one worker
                    log.exception("serving prompts with an identity worker failed")
                    await self._lose("internal error, see the log")
                # A worker that dies young would otherwise be restarted in a tight loop.
                delay = 0.0 if self._clock() - began > MAX_RESTART_DELAY else min(2 * delay + 0.05, MAX_RESTART_DELAY)
                await asyncio.sleep(delay)
        finally:
            await self._lose("the gateway is closing")

    async def _lose(self, message: str) -> None:
        self.live.clear()
        while self._waiting:
            self._waiting.popleft().fail("restarting", message)
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.create_task(process.kill())
        if self._ending is not None:
            await asyncio.shield(self._ending)  # a lane cancelled meanwhile comes back here to see it through

    async def _load_all(self, process: WorkerProcess) -> None:
        try:
            async with asyncio.timeout(self._load_seconds):
                await process.call(Unload(""))  # nothing of that name: the answer shows that the worker is up
        except TimeoutError as error:
            raise WorkerDied("it does not answer") from error
        for model, files in list(self._files.items()):
            if model in self._broken:
                continue
            try:
                async with asyncio.timeout(self._load_seconds):
                    reply = await process.call(Load(files))
            except Exception as error:
                self._break(files, "the identity worker does not survive loading it")
                raise WorkerDied(f"while loading {model}: {error}") from error
            if isinstance(reply, Failed):
                self._break(files, f"{reply.reason}: {reply.message}")

    async def _serve(self, process: WorkerProcess) -> None:
        watch = asyncio.create_task(process.exited())
        watch.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                while not self._waiting:
                    if watch.done():
                        raise WorkerDied("it ended while idle")
                    self._wake.clear()
                    await self._wake.wait()
                job = self._waiting.popleft()
                if not job.answer.done():
                    await self._serve_one(process, job)
        finally:
            watch.cancel()

    async def _serve_one(self, process: WorkerProcess, job: Job) -> None:
        try:
            async with asyncio.timeout(job.run_seconds):
                reply = await process.call(job.request)
        except TimeoutError as error:
            self.kills += 1
            self._blame(job.request, "takes longer than it may")
            job.fail("deadline", f"no token ids within {job.run_seconds} s")
            raise WorkerDied("killed at a deadline") from error
        except Exception:  # most of all WorkerDied; whatever else it is, the request must not do it to every worker
            self._blame(job.request, "kills the identity worker")
            job.fail("worker_died", "the identity worker died")
            raise
        except asyncio.CancelledError:
            job.fail("restarting", "the gateway is closing")
            raise
        if not job.answer.done():
            job.answer.set_result(reply)

    def _blame(self, request: Request, what: str) -> None:
        if isinstance(request, Load):
            self._break(request.files, f"loading it {what}")
        elif isinstance(request, Identify):
            self._on_kill(request)
        else:
            assert isinstance(request, Unload)

    def _break(self, files: ModelFiles, why: str) -> None:
        """Not for what is known only afterwards of files that were unloaded or replaced."""
        if self._files.get(files.model) is files:
            self._broken[files.model] = why

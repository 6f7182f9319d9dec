"""One identity worker process, seen from the gateway."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from gateway.identity import protocol
from gateway.identity.protocol import Reply, Request

_INHERITED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
)


class WorkerDied(Exception):
    """The worker ended, or sent what is no reply. Never leaves this package."""


class WorkerProcess:
    """A running worker. Owns the process; one call at a time. After WorkerDied or a cancelled call only `kill` is left.

    The worker sees a few variables of the environment, none of which holds a secret: what it runs is foreign code.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, cache_bytes: int, memory_bytes: int) -> WorkerProcess:
        """A new worker with no models. `memory_bytes` bounds its address space, 0 for no bound. Raises OSError."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.identity.worker",
            str(cache_bytes),
            str(memory_bytes),
            stdin=PIPE,
            stdout=PIPE,
            env=environment | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # so that a Ctrl-C in the gateway's terminal does not reach it
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    async def call(self, request: Request) -> Reply:
        """Sends a request and waits for its reply, without a deadline. Raises WorkerDied."""
        try:
            self._stdin.write(protocol.frame(request))
            await self._stdin.drain()
            (length,) = protocol.LENGTH.unpack(await self._stdout.readexactly(protocol.LENGTH.size))
            return protocol.decode_reply(await self._stdout.readexactly(length))
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise WorkerDied(str(error)) from error

    async def exited(self) -> None:
        """Returns when the worker has ended."""
        await self._process.wait()

    async def kill(self) -> None:
        """Ends the worker at once and waits until it is gone."""
        try:
            self._process.kill()
        except ProcessLookupError:
            pass
        self._stdin.close()
        await self._process.wait()
        # Reading up to the end lets the event loop close its side of the pipe.
        await self._stdout.read()

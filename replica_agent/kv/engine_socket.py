"""The Unix socket on which an engine reaches its agent's pool: connections, frames, and who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstore.engine_messages import (
    Answer,
    EngineHello,
    Question,
    Refused,
    Welcome,
    decode_hello,
    decode_question,
    encode,
    frame_length,
)
from kvstore.errors import ProtocolError
from kvstore.frames import LENGTH
from replica_agent.errors import SocketTaken
from replica_agent.kv.local_peer import local_peer

_logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""For a hello, and for the rest of any frame that has begun."""

MAX_CONNECTIONS = 256
"""An engine has one for each process that touches KV: a scheduler and a worker a rank."""


class Session(Protocol):
    """What one connection's questions are put to."""

    async def answer(self, question: Question) -> Answer:
        """The answer. Questions of one session come one at a time, in order."""

    def close(self) -> None:
        """The connection is gone, and with it everything that was held for it. Called once."""


class Greeting(NamedTuple):
    """The answer to a hello; a `session` and the pool's descriptor `fd` come with a `Welcome` only."""

    answer: Welcome | Refused
    session: Session | None = None
    fd: int = -1


class Host(Protocol):
    """Whom an engine gets to talk to."""

    async def greet(self, hello: EngineHello, hang_up: Callable[[], object]) -> Greeting:
        """Takes the connection or refuses it; `hang_up` ends it later, from the event loop, once or more often."""


class EngineSocket:
    """Owns the listening socket, the file it is under, and the task of every connection; used on one event loop.

    The file appears with mode 0660 and already listening, in place of one that a dead agent left. Only processes of
    the agent's own user, or of root, are talked to. A frame that is not one ends its connection and no other.
    """

    def __init__(self, path: Path, host: Host) -> None:
        self.path = path
        self._host = host
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Open connections, greeted or not."""
        return len(self._tasks)

    def listen(self) -> None:
        """Makes the socket, unless it is there already. Raises SocketTaken, naming the flag."""
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        made = self.path.with_name(f"{self.path.name}.{os.getpid() % 1_000_000}")
        try:
            if _answers(self.path):
                raise SocketTaken(f"--kv-socket: another agent answers at {self.path}")
            made.unlink(missing_ok=True)
            listener.bind(str(made))
            try:
                # Nobody can connect before `listen`, so nobody sees the mode it had before.
                made.chmod(0o660)
                listener.listen()
                made.rename(self.path)
            except OSError:
                made.unlink(missing_ok=True)
                raise
        except OSError as error:
            listener.close()
            raise SocketTaken(f"--kv-socket: cannot listen at {self.path}: {error.strerror or error}") from error
        except SocketTaken:
            listener.close()
            raise
        self._listener = listener

    async def run(self) -> None:
        """Serves until cancelled; then every connection is ended and the file removed."""
        self.listen()
        assert self._listener is not None
        inode = self.path.stat().st_ino
        server = await asyncio.start_unix_server(self._accepted, sock=self._listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # Another agent may have taken the place of this one, which had not answered it.
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == inode:
                    self.path.unlink()

    def close(self) -> None:
        """Ends a socket that never ran; otherwise `run` does it."""
        if self._listener is not None:
            self._listener.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ProtocolError, TimeoutError) as error:
            _logger.warning("a connection to %s ends: %s", self.path, error or "a frame did not come whole in time")
        except (OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            # Hung up on, or the agent stops: nothing is left to say. Whoever awaits a stream's task is told nothing.
            writer.transport.abort()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = writer.get_extra_info("socket")
        peer = local_peer(connection)
        refusal = ""
        if not peer.trusted:
            refusal = f"uid: this agent runs as {os.geteuid()} and the engine as {peer.uid}; they must be one"
        elif len(self._tasks) > MAX_CONNECTIONS:
            refusal = f"connections: {MAX_CONNECTIONS} are open already"
        async with asyncio.timeout(HELLO_S):
            hello = decode_hello(await _frame(reader))
        # A task is cancelled between two questions or while it waits for one, never in the middle of an answer.
        greeting = Greeting(Refused(reason=refusal)) if refusal else await self._host.greet(hello, task.cancel)
        if isinstance(greeting.answer, Refused):
            _logger.warning("process %d at %s is refused: %s", peer.pid, self.path, greeting.answer.reason)
            writer.write(encode(greeting.answer))
            await writer.drain()
            return
        session = greeting.session
        assert session is not None
        try:
            _send_with(connection.fileno(), encode(greeting.answer), greeting.fd)
            while True:
                header = await reader.readexactly(LENGTH.size)
                async with asyncio.timeout(HELLO_S):
                    question = decode_question(await reader.readexactly(frame_length(header)))
                writer.write(encode(await session.answer(question)))
                await writer.drain()
        finally:
            session.close()


def _answers(path: Path) -> bool:
    """Whether somebody listens at `path`. Raises OSError where something else than a socket is in the way."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            if path.exists() and not path.is_socket():
                raise FileExistsError(None, "there is a file that is no socket") from None
            return False
        except (TimeoutError, BlockingIOError):
            return True  # Its queue is full: somebody has it, who is slow.
        return True


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(frame_length(await reader.readexactly(LENGTH.size)))


def _send_with(fileno: int, frame: bytes, fd: int) -> None:
    """Sends a small first frame with a descriptor attached, which an event loop's stream cannot. Nothing has been sent
    on this connection before, so there is room."""
    with socket.socket(fileno=os.dup(fileno)) as raw:
        if socket.send_fds(raw, [frame], [fd]) != len(frame):
            raise OSError("the welcome did not fit")

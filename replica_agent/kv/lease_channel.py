"""One connection to another agent's lease socket."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from kvstore.errors import ProtocolError
from kvstore.frames import Frames
from kvstore.peer_frames import MAX_FRAME, Ask, Knock, Tell, Verb, pack, unpack
from kvstore.peer_messages import Door
from replica_agent.kv.local_peer import local_peer

IDLE_S = 60.0
"""A channel on which nothing is asked for so long is closed."""


class LeaseChannel(asyncio.Protocol):
    """Owns the connection and the questions that are not answered yet; used on one event loop. Ends when either side
    closes it, when the owner says what makes no sense, or when nothing is asked for long; what is still waited for
    then fails with ConnectionError."""

    def __init__(self) -> None:
        self._frames = Frames(MAX_FRAME)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Tell]] = {}
        self._asked = 0
        self._used = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, door: Door, token: str | None) -> LeaseChannel:
        """Connects and shows the token. Raises OSError, also where the name is another user's."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if not door.name.startswith(b"\0"):
                raise OSError("no abstract name")
            await loop.sock_connect(connection, door.name)
            owner = local_peer(connection)
            if not owner.trusted:
                raise PermissionError(f"user {owner.uid} has taken the name")
            _, channel = await loop.create_unix_connection(cls, sock=connection)
        except BaseException:
            connection.close()
            raise
        assert channel._transport is not None
        channel._transport.write(pack(Knock(token or "")))
        return channel

    @property
    def alive(self) -> bool:
        """Whether anything can be asked."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, verb: Verb, lease: str, body: bytes) -> asyncio.Future[Tell]:
        """The answer to come; the question has been sent when this returns. Who waits for it no more cancels it.
        Raises ProtocolError for a body that is too long, ConnectionError where nothing can be asked."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the owner hung up")
        loop = asyncio.get_running_loop()
        number = self._asked = self._asked + 1
        transport.write(pack(Ask(number, verb, lease, body)))
        self._used = loop.time()
        told: asyncio.Future[Tell] = loop.create_future()
        self._waiting[number] = told
        told.add_done_callback(lambda _: self._waiting.pop(number, None))
        return told

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """Asserts that nobody waits for what is over."""
        assert self._transport is not None or not self._waiting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A uvloop transport is one, though it does not say so.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._used = asyncio.get_running_loop().time()
        self._look_later(IDLE_S)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                tell = unpack(body, Tell)
                told = self._waiting.get(tell.number)
                # The answer to a question that was given up comes here, too.
                if told is not None and not told.done():
                    told.set_result(tell)
        except ProtocolError:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for told in [*self._waiting.values()]:
            if not told.done():
                told.set_exception(ConnectionResetError("the owner hung up"))

    def _look_later(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._used + IDLE_S - asyncio.get_running_loop().time()
        if left > 0 or self._waiting:
            self._look_later(max(left, 1.0))
        else:
            self.close()

"""The Unix socket on which agents of this host ask for leases: connections, frames, and who may connect."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from typing import cast

from kvstore.errors import ProtocolError
from kvstore.frames import Frames
from kvstore.peer_frames import MAX_FRAME, Ask, Knock, Tell, pack, unpack
from kvstore.peer_messages import Door
from kvstore.transfer.host import host_identity
from replica_agent.errors import LeaseRequestBad
from replica_agent.kv.lease_service import LeaseService
from replica_agent.kv.local_peer import local_peer

_logger = logging.getLogger(__name__)

FRAME_S = 5.0
"""For the first frame, and for the rest of any that has begun."""

MAX_CONNECTIONS = 256
"""Every other agent of a host has one."""


class LeaseSocket:
    """Owns the listening socket and its connections; used on one event loop.

    The name is abstract: there is no file to protect or to leave behind. Only processes of the agent's own user, or of
    root, are talked to, and those only after they have shown the token. Where no such socket can be made, leases are
    asked for over HTTP alone.
    """

    def __init__(self, service: LeaseService, token: str | None) -> None:
        self._service = service
        self._token = (token or "").encode()
        self._connections: set[_Connection] = set()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def run(self) -> None:
        """Serves until cancelled; then every connection is ended."""
        server = None
        try:
            door = Door(host=host_identity(), name=b"\0prefix-gateway-" + secrets.token_hex(16).encode())
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                listener.bind(door.name)
                server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), sock=listener)
                self._service.door = door
            except OSError:
                listener.close()
                raise
        except OSError as error:
            _logger.info("leases over HTTP alone: %s", error)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._service.door = None
            if server is not None:
                server.close()
            for connection in [*self._connections]:
                connection.abort()

    def check(self) -> None:
        """Asserts that there are no more connections than allowed."""
        assert len(self._connections) <= MAX_CONNECTIONS

    # What its connections tell and ask.

    def connected(self, connection: _Connection, peer: socket.socket) -> bool:
        """Whether it may stay."""
        if not local_peer(peer).trusted or len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def ended(self, connection: _Connection) -> None:
        """It is gone."""
        self._connections.discard(connection)

    def admits(self, knock: Knock) -> bool:
        """Whether it is the deployment's token."""
        return hmac.compare_digest(knock.token.encode(), self._token)

    def answer(self, ask: Ask) -> Tell:
        """The service's answer."""
        try:
            return Tell(ask.number, *self._service.answer(ask.verb, ask.lease, ask.body))
        except LeaseRequestBad as error:
            return Tell(ask.number, error.status, str(error).encode())


class _Connection(asyncio.Protocol):
    """One peer's. Answers as soon as a question is there, without a task: nothing in the service waits."""

    def __init__(self, owner: LeaseSocket) -> None:
        self._owner = owner
        self._frames = Frames(MAX_FRAME)
        self._transport: asyncio.Transport | None = None
        self._admitted = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A uvloop transport is one, though it does not say so.
        self._transport = transport = cast(asyncio.Transport, transport)
        # A peer that takes no answers keeps no more than this of them here.
        transport.set_write_buffer_limits(high=MAX_FRAME)
        if not self._owner.connected(self, transport.get_extra_info("socket")):
            self.abort()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if self._admitted:
                    answer = self._owner.answer(unpack(body, Ask))
                    if self._transport is not None:
                        self._transport.write(pack(answer))
                elif self._owner.admits(unpack(body, Knock)):
                    self._admitted = True
                else:
                    raise ProtocolError("it does not know the deployment's token")
        except ProtocolError as error:
            _logger.warning("a peer's connection ends: %s", error)
            self.abort()
            return
        if self._admitted and not self._frames.partial:
            self._stop_waiting()
        else:
            self._wait()

    def pause_writing(self) -> None:
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stop_waiting()
        self._owner.ended(self)

    def abort(self) -> None:
        """End it now."""
        self._stop_waiting()
        if self._transport is not None:
            self._transport.abort()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FRAME_S, self.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

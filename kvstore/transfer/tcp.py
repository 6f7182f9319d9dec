"""Own sockets: the transport that needs nothing but a network. The protocol is in `kvstore.transfer.tcp_owner`.

A reader receives into its own slots. Once it has closed the connection nothing more can land there, so a fetch that is
cut short leaves its targets safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from kvstore.errors import TransportUnavailable
from kvstore.peer_messages import Offer
from kvstore.transfer.base import Arrived, Authorize, Plan, Region, Result, Transport
from kvstore.transfer.job import DEADLINE, Job, Jobs, run, size_error
from kvstore.transfer.tcp_owner import Answer, Ask, Owner, read_frame, read_into, send, shut, tune, wait

IDLE_S = 30.0
"""A connection unused for so long is closed: half of what an owner waits, so that one taken is hardly ever stale."""

CONNECT_S = 3.0
"""An owner that does not accept a connection within this is not tried any longer."""

_THREADS = 16
"""As many as an agent has fetches at once, so that a slow owner keeps no fetch from another waiting."""

_Peer = tuple[str, int]


class TcpTls(NamedTuple):
    """`owner` shows a certificate to readers and wants one of them, `reader` does so to owners, whose certificates say
    `server_name` where that is not "", or else the host that is connected to."""

    owner: ssl.SSLContext
    reader: ssl.SSLContext
    server_name: str = ""


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """`host` is "" where the owner's agent answers; `tls` whether it speaks nothing else."""

    port: int
    pitch: int
    host: str = ""
    tls: bool = False


class Tcp(Transport):
    """Owns the listening socket with its threads, and the idle connections to owners (event loop only; a connection in
    use belongs to the thread of its fetch)."""

    name = "tcp"

    def __init__(
        self, host: str, port: int = 0, *, advertise: tuple[str, int] | None = None, tls: TcpTls | None = None
    ) -> None:
        """Serves on `host`; `port` 0: any that is free. Peers connect to `advertise`, where that is not the agent's
        own host and this port. With `tls` nothing is sent or fetched without."""
        self._tls = tls
        self._host = host
        self._port = port
        self._advertise = advertise
        self._owner: Owner | None = None
        self._region: Region | None = None
        self._idle: dict[_Peer, list[tuple[float, socket.socket]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._jobs = Jobs()
        self._threads = ThreadPoolExecutor(_THREADS, "tcp-fetch")

    async def start(self, region: Region, authorize: Authorize) -> None:
        try:
            self._owner = await asyncio.to_thread(
                Owner, self._host, self._port, region, authorize, None if self._tls is None else self._tls.owner
            )
        except OSError as error:
            raise TransportUnavailable(
                f"tcp: cannot listen on {self._host}:{self._port}: {error}", passes=True
            ) from error
        self._region = region

    def offer(self) -> Offer:
        assert self._owner is not None and self._region is not None, "started"
        host, port = self._advertise or ("", self._owner.port)
        address = _Address(port, self._region.pitch, host, self._tls is not None)
        return Offer(transport=self.name, data=msgspec.msgpack.encode(address))

    def reaches(self, offer: Offer) -> bool:
        if offer.transport != self.name:
            return False
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            return msgspec.msgpack.decode(offer.data, type=_Address).tls == (self._tls is not None)
        return True  # `fetch` says what is wrong with it

    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        region = self._region
        assert region is not None, "started"
        try:
            address = msgspec.msgpack.decode(plan.offer.data, type=_Address)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Result(0, True, f"the owner's address makes no sense: {error}")
        if why := size_error(address.pitch, region.pitch):
            return Result(0, True, why)
        with self._jobs.begin(plan.deadline) as job:
            return await self._fetch(plan, (address.host or plan.owner_host, address.port), region, job, arrived)

    async def _fetch(self, plan: Plan, peer: _Peer, region: Region, job: Job, arrived: Arrived) -> Result:
        loop = asyncio.get_running_loop()
        while True:
            idle = self._take(peer)
            try:
                connection = idle or await _connect(peer, job)
            except OSError as error:
                return Result(0, True, job.over() or f"cannot connect to {peer[0]}:{peer[1]}: {error}")
            fetch = _Fetch(plan, region, job, arrived, connection, self._tls, peer[0])
            result = await run(job, loop.run_in_executor(self._threads, fetch.run))
            if job.over():
                # It may have been shut down just after the thread had used it.
                fetch.connection.close()
            elif fetch.reusable:
                self._give(peer, fetch.connection)
            # A connection that an owner closed while it was idle says so only when it is used.
            if idle is None or fetch.heard or job.over():
                return result

    def _take(self, peer: _Peer) -> socket.socket | None:
        connections = self._idle.get(peer)
        return connections.pop()[1] if connections else None

    def _give(self, peer: _Peer, connection: socket.socket) -> None:
        self._idle.setdefault(peer, []).append((time.monotonic(), connection))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Connections wait in the order in which they were given back, so the old ones are in front."""
        self._timer = None
        old = time.monotonic() - IDLE_S
        for peer, connections in [*self._idle.items()]:
            while connections and connections[0][0] <= old:
                connections.pop(0)[1].close()
            if not connections:
                del self._idle[peer]
        if self._idle:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    async def close(self) -> None:
        self._jobs.stop()
        if self._owner is not None:
            await asyncio.to_thread(self._owner.close)
        await asyncio.to_thread(self._threads.shutdown)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connections in self._idle.values():
            for _, connection in connections:
                connection.close()
        self._idle.clear()

    def check(self) -> None:
        """While nothing is fetched: every connection that is kept is open, and will be closed in its time."""
        self._jobs.check(idle=True)
        kept = [connection for connections in self._idle.values() for _, connection in connections]
        assert all(connection.fileno() >= 0 for connection in kept)
        assert bool(kept) <= (self._timer is not None)


async def _connect(peer: _Peer, job: Job) -> socket.socket:
    """Raises OSError, TimeoutError among them."""
    loop = asyncio.get_running_loop()
    failed = OSError("the name has no address")
    async with asyncio.timeout(min(CONNECT_S, job.remaining())):
        try:
            found = await loop.getaddrinfo(*peer, type=socket.SOCK_STREAM)
        except (ValueError, OverflowError) as error:
            raise OSError(f"no place on a network: {error}") from error
        for family, kind, protocol, _, address in found:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                return connection
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError):
                    raise
                failed = error
    raise failed


class _Fetch:
    """One plan over one connection, on one thread. `heard`: the owner has answered; `reusable`: `connection` is where
    the next ask can begin. It is closed when it is not. A new one is encrypted first, where it is to be."""

    def __init__(
        self,
        plan: Plan,
        region: Region,
        job: Job,
        arrived: Arrived,
        connection: socket.socket,
        tls: TcpTls | None,
        host: str,
    ) -> None:
        self._tls = tls
        self._host = host
        self.heard = False
        self.reusable = False
        self._plan = plan
        self._region = region
        self._job = job
        self._arrived = arrived
        self.connection = connection

    def run(self) -> Result:
        job = self._job
        moved = 0
        job.interrupt = lambda: shut(self.connection)
        try:
            if job.over():
                return Result(0, True, job.over())
            if self._tls is not None and not isinstance(self.connection, ssl.SSLSocket):
                self._encrypt(self._tls)
            connection = self.connection
            tune(connection, send_s=job.remaining())
            wait(connection, job.remaining())
            send(connection, Ask(self._plan.lease, self._plan.secret, [move.source for move in self._plan.moves]))
            answer = msgspec.msgpack.decode(read_frame(connection), type=Answer)
            self.heard = True
            if not answer.error:
                for index, move in enumerate(self._plan.moves):
                    if job.over():
                        return Result(moved, True, job.over())
                    self._receive(move.target)
                    moved = index + 1
                    self._arrived(index)
            self.reusable = not job.over()
            return Result(moved, True, answer.error)
        except (OSError, EOFError, msgspec.MsgspecError, RecursionError) as error:
            why = DEADLINE if isinstance(error, BlockingIOError | TimeoutError) else f"the owner failed: {error}"
            return Result(moved, True, job.over() or why)
        finally:
            job.interrupt = None
            if not self.reusable:
                self.connection.close()

    def _encrypt(self, tls: TcpTls) -> None:
        name = tls.server_name or self._host
        self.connection.settimeout(max(self._job.remaining(), 0.001))
        encrypted = tls.reader.wrap_socket(self.connection, server_hostname=name, do_handshake_on_connect=False)
        self.connection = encrypted
        encrypted.do_handshake()

    def _receive(self, target: int) -> None:
        pitch = self._region.pitch
        read_into(self.connection, self._region.memory[target * pitch : (target + 1) * pitch])

"""The owner's end of the TCP transport, and the protocol that both ends speak.

    reader -> owner    u32 length, Ask (msgpack): the lease, its secret, slots
    owner -> reader    u32 length, Answer (msgpack); unless it has an error, then the slots, whole and in that order

With TLS both ends show a certificate first, and everything is encrypted. One ask at a time on a connection. The owner
looks at the lease every few slots and hangs up when it is over, for in the middle of bytes there is no other way to say
so. Lengths are little-endian.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.bounds import Name
from kvstore.namespace import MAX_CONTENT_KEYS
from kvstore.transfer.base import Authorize, Region

MAX_CONNECTIONS = 64
"""Connections at once. The next one takes the place of that on which nothing has been asked for longest; while all
are being answered, it is hung up on, and its reader computes instead."""

IDLE_S = 60.0
"""A connection on which nothing is asked for so long is closed."""

STALL_S = 10.0
"""As is one whose reader leaves an ask half sent, or takes nothing of a slot, for so long."""

AT_ONCE = 8
"""Slots of one system call, and between two looks at the lease."""

MAX_FRAME = 1 << 20
LENGTH = struct.Struct("<I")


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Send these slots, which the lease names."""

    lease: Name
    secret: bytes
    slots: Annotated[list[int], Meta(max_length=MAX_CONTENT_KEYS)]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Why none comes; "" when all follow."""

    error: str = ""


class Owner:
    """Owns the listening socket, one thread that accepts, and one for each reader that is connected. `authorize` is
    asked from those threads. Readers keep connections for their next fetch, so many readers have many idle ones."""

    def __init__(
        self, host: str, port: int, region: Region, authorize: Authorize, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listens from now on. Raises OSError when it cannot."""
        self._tls = tls
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._region = region
        self._authorize = authorize
        self._lock = threading.Lock()
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}
        self._closed = False
        self._listener = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Hangs up on everybody, and waits for the threads to end."""
        with self._lock:
            self._closed = True
            readers = [*self._readers.items()]
        for each in (self._listener, *(connection for connection, _ in readers)):
            with contextlib.suppress(OSError):
                shut(each)
        for thread in (self._accepting, *(thread for _, thread in readers)):
            thread.join(STALL_S)
        self._listener.close()

    def check(self) -> None:
        """No more readers than are allowed, and each has its thread."""
        with self._lock:
            assert len(self._readers) <= MAX_CONNECTIONS
            assert not self._closed or not self._readers
            assert self._idle.keys() <= self._readers.keys()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed, or out of descriptors: then once more when some may be free again.
                time.sleep(0 if self._closed else 0.1)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="tcp-reader", daemon=True)
            with self._lock:
                if len(self._readers) >= MAX_CONNECTIONS and self._idle:
                    self._hang_up(next(iter(self._idle)))
                welcome = not self._closed and len(self._readers) < MAX_CONNECTIONS
                if welcome:
                    self._readers[connection] = thread
                    self._idle[connection] = None
            if not (welcome and self._started(thread, connection)):
                connection.close()

    def _started(self, thread: threading.Thread, connection: socket.socket) -> bool:
        try:
            thread.start()
            return True
        except RuntimeError:
            # Out of threads: the next reader may find one.
            with self._lock:
                self._idle.pop(connection, None)
                self._readers.pop(connection, None)
            return False

    def _hang_up(self, connection: socket.socket) -> None:
        """Its thread, which waits for the next ask, hears of it and ends."""
        del self._idle[connection], self._readers[connection]
        with contextlib.suppress(OSError):
            shut(connection)

    def _encrypt(self, accepted: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        """The same connection, in the same place among the readers, before anything is said on it."""
        accepted.settimeout(STALL_S)
        with self._lock:
            encrypted = tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
            thread = self._readers.pop(accepted, None)
            self._idle.pop(accepted, None)
            if thread is not None:
                self._readers[encrypted] = thread
                self._idle[encrypted] = None
        if thread is None:
            encrypted.close()
            raise EOFError("hung up on in the meantime")
        return encrypted

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._encrypt(connection, self._tls)
                connection.do_handshake()
            tune(connection, send_s=STALL_S)
            while self._answer(connection):
                pass
        except (OSError, EOFError, msgspec.MsgspecError, RecursionError):
            # Gone, stalled, or no reader of ours: nothing to tell it.
            pass
        finally:
            with self._lock:
                self._idle.pop(connection, None)
                self._readers.pop(connection, None)
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """One ask; False when the connection has to be closed."""
        wait(connection, IDLE_S)
        length = read(connection, LENGTH.size)
        with self._lock:
            if connection not in self._idle:
                return False  # Hung up on just now.
            del self._idle[connection]
        try:
            return self._answer_ask(connection, length)
        finally:
            with self._lock:
                if connection in self._readers:
                    self._idle[connection] = None

    def _answer_ask(self, connection: socket.socket, length: bytes) -> bool:
        wait(connection, STALL_S)
        ask = msgspec.msgpack.decode(read(connection, _bounded(length)), type=Ask)
        if not self._may(ask, ask.slots):
            send(connection, Answer("the owner refuses: no such lease"))
            return True
        send(connection, Answer())
        memory, pitch = self._region.memory, self._region.pitch
        for at in range(0, len(ask.slots), AT_ONCE):
            slots = ask.slots[at : at + AT_ONCE]
            if not self._may(ask, slots):
                return False
            if not send_all(connection, [memory[slot * pitch : (slot + 1) * pitch] for slot in slots]):
                return False
        return True

    def _may(self, ask: Ask, slots: Sequence[int]) -> bool:
        """Whether the lease names all of these now: one look for however many."""
        grant = self._authorize(ask.lease, ask.secret)
        return grant is not None and grant.slots.issuperset(slots) and time.monotonic() < grant.deadline


def tune(connection: socket.socket, *, send_s: float) -> None:
    """Blocking, with timeouts by the kernel: then one call moves a whole slot, outside of the GIL. TLS knows of no such
    timeouts, and has one for each of its own calls."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(max(send_s, 0.001))
        return
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))


def wait(connection: socket.socket, seconds: float) -> None:
    """How long each further receive may take in all; with TLS, each of its records."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(max(seconds, 0.001))
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def read(connection: socket.socket, count: int) -> bytes:
    """That many bytes. Raises EOFError when fewer came before the end or the timeout."""
    found = bytearray(count)
    read_into(connection, memoryview(found))
    return bytes(found)


def read_into(connection: socket.socket, target: memoryview) -> None:
    """As many bytes as `target` has. Raises EOFError when fewer came before the end or the timeout."""
    if not isinstance(connection, ssl.SSLSocket):
        if connection.recv_into(target, 0, socket.MSG_WAITALL) < len(target):
            raise EOFError("the other side hung up")
        return
    at = 0
    while at < len(target):
        received = connection.recv_into(target[at:])
        if not received:
            raise EOFError("the other side hung up")
        at += received


def send_all(connection: socket.socket, parts: Sequence[memoryview]) -> bool:
    """All of them, one after the other; False when the reader stalled."""
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return True
    # Blocking, so it sends all of it, unless the reader stalls.
    return connection.sendmsg(parts) == sum(map(len, parts))


def shut(connection: socket.socket) -> None:
    """Ends a connection that another thread may be using. TLS's own way would let that thread go on in plain text."""
    socket.socket.shutdown(connection, socket.SHUT_RDWR)


def read_frame(connection: socket.socket) -> bytes:
    """A frame without its length. Raises EOFError; OSError for a timeout."""
    return read(connection, _bounded(read(connection, LENGTH.size)))


def send(connection: socket.socket, message: Ask | Answer) -> None:
    """A message as a frame."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(body)) + body)


def _bounded(length: bytes) -> int:
    count = int(LENGTH.unpack(length)[0])
    if not 0 < count <= MAX_FRAME:
        raise EOFError(f"not a frame of this protocol: {count} bytes")
    return count


def _timeval(seconds: float) -> bytes:
    # Zero would mean for ever.
    micros = max(1_000, int(seconds * 1e6))
    return struct.pack("@ll", *divmod(micros, 1_000_000))

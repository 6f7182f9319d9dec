"""How two agents of one host ask each other for leases without HTTP: frames on a Unix socket that stays open.

    reader -> owner    Knock, once; then any number of Ask
    owner -> reader    Tell, one for each Ask, under its number

Frames: u32 big-endian length, then msgpack, at most 4 MiB. What is asked and told is what `kvstore.peer_messages` says
of `POST /v1/leases` and the paths below it: the same bodies, the same statuses, the same token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias, TypeVar

import msgspec

from kvstore.errors import ProtocolError

MAX_FRAME = 4 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Verb: TypeAlias = Literal["lease", "renew", "release"]


class Knock(msgspec.Struct, frozen=True, array_like=True):
    """Who may come in: the deployment's token, "" where it has none."""

    token: str


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """`body` is the request's, packed; `lease` the id in the path of a renewal or release."""

    number: int
    verb: Verb
    lease: str
    body: bytes


class Tell(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the Ask of this number: an HTTP status, and the body that goes with it, text for 400 and 404."""

    number: int
    status: int
    body: bytes


_T = TypeVar("_T", Knock, Ask, Tell)


def pack(frame: Knock | Ask | Tell) -> bytes:
    """With its length before it. Raises ProtocolError for one that is too long."""
    body = msgspec.msgpack.encode(frame)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


class Frames:
    """Cuts a byte stream into the bodies of frames. Owns at most one that is not complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by `data`. Raises ProtocolError; the stream is then unusable."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > MAX_FRAME:
                raise ProtocolError(f"peer announced a frame of {length} bytes; the limit is {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(buffer) < end:
                return
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            yield body

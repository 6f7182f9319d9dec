"""Messages on a byte stream: a u32 big-endian length, then the body."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kvstore.errors import ProtocolError

LENGTH = struct.Struct(">I")


def framed(body: bytes, limit: int) -> bytes:
    """A body with its length before it. Raises ProtocolError for one over `limit` bytes."""
    if len(body) > limit:
        raise ProtocolError(f"frame of {len(body)} bytes is over the limit of {limit}")
    return LENGTH.pack(len(body)) + body


def body_length(header: bytes | bytearray, limit: int) -> int:
    """Bytes that follow the length that `header` begins with. Raises ProtocolError for more than `limit`."""
    (length,) = LENGTH.unpack_from(header)
    if length > limit:
        raise ProtocolError(f"peer announced a frame of {length} bytes; the limit is {limit}")
    return int(length)


class Frames:
    """Cuts a byte stream into the bodies of frames, of at most `limit` bytes; feed it whatever arrives.

    Owns at most one that is not complete.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by `data`. Raises ProtocolError; the stream is then unusable."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH.size:
            end = LENGTH.size + body_length(buffer, self._limit)
            if len(buffer) < end:
                return
            body = bytes(buffer[LENGTH.size : end])
            del buffer[:end]
            yield body

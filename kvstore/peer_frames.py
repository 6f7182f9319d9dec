"""How two agents of one host ask each other for leases without HTTP: frames on a Unix socket that stays open.

    reader -> owner    Knock, once; then any number of Ask
    owner -> reader    Tell, one for each Ask, under its number

Frames (`kvstore.frames`) of msgpack, at most 4 MiB. What is asked and told is what `kvstore.peer_messages` says
of `POST /v1/leases` and the paths below it: the same bodies, the same statuses, the same token.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.frames import framed

MAX_FRAME = 4 * 1024 * 1024

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
    return framed(msgspec.msgpack.encode(frame), MAX_FRAME)


def unpack(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error

"""How two agents of one host ask each other for leases without HTTP: frames on a Unix socket that stays open.

    reader -> owner    Knock, once; then any number of Ask
    owner -> reader    Tell, one for each Ask, under its number

Frames (`kvstore.frames`) of msgpack, at most 4 MiB. What is asked and told is what `kvstore.peer_messages` says
of `POST /v1/leases` and the paths below it: the same bodies, the same statuses, the same token.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvstore.bounds import U64, Text
from kvstore.errors import ProtocolError
from kvstore.frames import framed
from kvstore.peer_messages import LeaseId

MAX_FRAME = 4 * 1024 * 1024

Verb: TypeAlias = Literal["lease", "renew", "release"]


class Knock(msgspec.Struct, frozen=True, array_like=True):
    """Who may come in: the deployment's token, "" where it has none."""

    token: Text


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """`body` is the request's, packed; `lease` the id in the path of a renewal or release."""

    number: U64
    verb: Verb
    lease: LeaseId
    body: bytes


class Tell(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the Ask of this number: an HTTP status, and the body that goes with it, text for 400 and 404."""

    number: U64
    status: Annotated[int, Meta(ge=100, le=599)]
    body: bytes


_T = TypeVar("_T", Knock, Ask, Tell)


def pack(frame: Knock | Ask | Tell) -> bytes:
    """With its length before it. Raises ProtocolError for one that is too long."""
    return framed(msgspec.msgpack.encode(frame), MAX_FRAME)


def unpack(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError, naming the field."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        # In an array a field has a number.
        said = re.sub(r"\$\[(\d+)\]", lambda at: f"$.{kind.__struct_fields__[int(at[1])]}", str(error))
        raise ProtocolError(f"not a {kind.__name__}: {said}") from error

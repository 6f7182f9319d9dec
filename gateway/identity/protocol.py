"""What the gateway and its identity worker say to each other over the worker's stdin and stdout.

Frames: u32 big-endian length, then a msgpack message. The worker answers every request with one reply, in order.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from gateway.identity.chat import Dialect
from gateway.identity.prompt import PromptRequest
from gateway.identity.tokens import CacheStats
from kvstore.messages import ModelFiles

LENGTH = struct.Struct(">I")


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Makes a model's files usable under its name, in place of those it had."""

    files: ModelFiles


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Forgets a model."""

    model: str


class Identify(msgspec.Struct, frozen=True, tag="identify"):
    """Asks for the keys of a request under `root`; `model` names the files to use, None for prompts of token ids.

    `ids` asks for the token ids too.
    """

    model: str | None
    root: int
    request: PromptRequest
    dialect: Dialect
    ids: bool = False


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A model can be used. `whole_because` says why its texts are not segmented; `chat` whether it has a template."""

    whole_because: str
    chat: bool


class Identified(msgspec.Struct, frozen=True, tag="identified"):
    """A request's length in tokens, its packed RouteKeys and, where asked for, its packed token ids."""

    tokens: int
    keys: bytes
    ids: bytes | None
    cache: CacheStats


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A model was forgotten."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request cannot be served; `reason` as in IdentityUnavailable."""

    reason: str
    message: str


Request: TypeAlias = Load | Unload | Identify
Reply: TypeAlias = Loaded | Identified | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Request | Reply) -> bytes:
    """A message as it travels."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body

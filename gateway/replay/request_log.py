"""A log of OpenAI requests: JSON lines of a timestamp and a body, as `serve --request-log` writes them.

    {"timestamp": 1764400000.25, "body": {"model": "m", "messages": [...]}, "completion_tokens": 87}
    {"timestamp": 1764400000.25, "prompt_tokens": 2031, "block_tokens": 512, "hash_ids": [...], "completion_tokens": 87}

The first form is what most proxies can write; the second holds no text. `timestamp` is Unix time in seconds, or
ISO 8601. `completion_tokens` may be missing (or stand in `usage`, as in a reply): then the body's own limit counts, or
`ASSUMED_OUTPUT_TOKENS`.
"""

from __future__ import annotations

from array import array
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.errors import RequestError
from gateway.identity import text
from gateway.path.admit import CHAT, COMPLETIONS, prompt_request
from gateway.path.body import Body
from gateway.path.request_log import BLOCK_TOKENS, Hashed, block_ids
from gateway.path.usage import Usage
from gateway.settings import field_first
from kvstore.identity import UNIT_TOKENS, Namespace, token_keys

ASSUMED_OUTPUT_TOKENS = 256
"""Length of an answer of which a log says nothing."""

_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Line(msgspec.Struct, kw_only=True):
    timestamp: float | str
    body: msgspec.Raw = msgspec.Raw()
    block_tokens: int | None = None
    completion_tokens: _Count | None = None
    usage: Usage | None = None


class _Limits(msgspec.Struct):
    max_completion_tokens: _Count | None = None
    max_tokens: _Count | None = None


class Entry(NamedTuple):
    """One logged request: Unix seconds, tokens, and block ids of `BLOCK_TOKENS`; `output` None where nothing says."""

    at: float
    tokens: int
    output: int | None
    ids: array[int]


_line = msgspec.json.Decoder(_Line).decode
_hashed = msgspec.json.Decoder(Hashed).decode
_limits = msgspec.json.Decoder(_Limits).decode
_tokens = msgspec.json.Decoder(list[int]).decode


def read(line: bytes) -> Entry:
    """One line. Raises ValueError (msgspec's among them) that begins with the field that makes no sense."""
    found = _line(line)
    at = _seconds(found.timestamp)
    if not found.body:
        hashed = _hashed(line)
        if hashed.block_tokens != BLOCK_TOKENS:
            raise ValueError(f"block_tokens: expected {BLOCK_TOKENS}, got {hashed.block_tokens}")
        try:
            ids = array("Q", hashed.hash_ids)
        except OverflowError:
            raise ValueError("hash_ids: an id is below 0 or above 2**64 - 1") from None
        return Entry(at, hashed.prompt_tokens, hashed.completion_tokens, ids)
    raw = bytes(found.body)
    if raw[:1] == b'"':  # a body that was logged as a string
        raw = msgspec.json.decode(raw, type=str).encode()
    try:
        tokens, ids = _prompt(raw)
        limits = _limits(raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"body.{field_first(str(error))}") from error
    except RequestError as error:
        raise ValueError(f"body{'.' + error.param if error.param else ''}: {error.message}") from error
    output = found.completion_tokens
    if output is None and found.usage is not None:
        output = found.usage.completion_tokens
    if output is None:
        output = limits.max_completion_tokens or limits.max_tokens
    return Entry(at, tokens, output, ids)


def _prompt(raw: bytes) -> tuple[int, array[int]]:
    """Tokens and block ids of a body's prompt: of its token ids, if it gives them, else of its text."""
    body = Body(raw)
    model = body.string("model") or ""
    request = prompt_request(CHAT if body.get("messages") is not None else COMPLETIONS, model, body)
    assert request is not None
    if request.prompt is not None:
        try:
            ids = _tokens(request.prompt)
        except msgspec.MsgspecError:
            pass
        else:
            return max(1, len(ids)), block_ids(token_keys(Namespace(model).root(0), ids), UNIT_TOKENS)
    identity = text.identify(request, seed=0)
    return max(1, identity.tokens), block_ids(identity.keys, identity.unit_tokens)


def _seconds(timestamp: float | str) -> float:
    if not isinstance(timestamp, str):
        return timestamp
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError as error:
        raise ValueError(f"timestamp: {error}") from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

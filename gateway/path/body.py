"""A request body as the gateway sees it: the fields it needs, and the bytes it forwards.

The gateway must understand a body and yet forward what the client wrote. So it keeps the client's bytes and notes where
each top-level field stands; a change cuts out or replaces whole fields and leaves every other byte of every value as it
was. Two spellings of one key (`"model"` twice, or once as `"mod\\u0065l"`) could make gateway and engine read
different requests, so a duplicate of a key that the gateway owns or routes by is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from gateway.errors import RequestError

STRIPPED = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "cache_salt",
        "extra_key",
        "vllm_xargs",
        "priority",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)
"""Engine-control fields that clients may not set, in the words of vLLM and SGLang: where KV comes from and goes to,
which of it may be shared, whose turn it is, which rank computes."""

UNIQUE = STRIPPED | {
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "stream_options",
    "tools",
    "chat_template_kwargs",
}
"""Keys that the gateway owns or routes by: one spelling each, or 400."""

T = TypeVar("T")

_OPEN = re.compile(rb"\s*\{\s*")
_KEY = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*', re.DOTALL)
_NEXT = re.compile(rb"\s*([,}])")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|[^"{}\[\],]+', re.DOTALL)

MAX_FIELDS = 1_000
"""Top-level fields of a body; APIs know a few dozen."""

MAX_SKIPPED = 64 * 1024
"""Bytes of a value that a later one of the same key replaces; it is walked token by token, on the event loop."""

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode


class Field(NamedTuple):
    """One top-level field: its unescaped key and where key and value stand in the body."""

    key: str
    start: int
    value: int
    end: int


class Body:
    """A parsed JSON object body. Immutable; slices stay valid as long as it does."""

    __slots__ = ("_values", "fields", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises RequestError 400 for a body that is not one JSON object, or that is ambiguous."""
        self.raw = raw
        try:
            self._values = _decode_fields(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(400, f"the body is not a JSON object: {error}", code="invalid_json") from error
        self.fields = _scan(raw, self._values)

    def get(self, key: str) -> bytes | None:
        """The raw JSON of a top-level value, None when absent."""
        value = self._values.get(key)
        return None if value is None else bytes(value)

    def string(self, key: str) -> str | None:
        """A string field; None when absent or null. Raises RequestError 400 naming the field otherwise."""
        return self._typed(key, str, "a string")

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean field, `default` when absent or null. Raises RequestError 400 naming the field otherwise."""
        value = self._typed(key, bool, "a boolean")
        return default if value is None else value

    def _typed(self, key: str, type_: type[T], words: str) -> T | None:
        value = self._values.get(key)
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=type_ | None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(400, f"{key} must be {words}", param=key, code="invalid_type") from error

    def edited(self, remove: Collection[str], put: Mapping[str, bytes]) -> bytes:
        """The body without the fields in `remove` and with those in `put` (key -> raw JSON); the rest as it was."""
        kept = [self.raw[f.start : f.end] for f in self.fields if f.key not in remove and f.key not in put]
        kept += [b'"%s":%s' % (key.encode(), value) for key, value in put.items()]
        return b"{" + b",".join(kept) + b"}"


def _scan(body: bytes, values: Mapping[str, msgspec.Raw]) -> list[Field]:
    """Where each top-level field stands. The body is known to be valid JSON, so only positions are looked for.

    Values are skipped by comparing with the decoded one (a memcmp); only a duplicate key's earlier value differs from
    it and is walked token by token. So the whole costs time in proportion to the body, whatever it repeats.
    """
    if len(values) > MAX_FIELDS:
        raise _too_many()
    opening = _OPEN.match(body)
    assert opening is not None
    at = opening.end()
    fields: list[Field] = []
    seen: dict[str, bytes] = {}
    while body[at : at + 1] != b"}":
        named = _KEY.match(body, at)
        assert named is not None
        text = named[1]
        key = _decode_key(text) if b"\\" in text else text[1:-1].decode()
        start, value = named.start(1), named.end()
        if (repeated := key in seen) and key in UNIQUE:
            raise RequestError(400, f"{key} is given more than once", param=key, code="duplicate_key")
        raw = seen[key] if repeated else seen.setdefault(key, bytes(values[key]))
        end = value + len(raw)
        closing = _NEXT.match(body, end) if body.startswith(raw, value) else None
        if closing is None:
            end = _skip(body, value)
            closing = _NEXT.match(body, end)
            assert closing is not None
        fields.append(Field(key, start, value, end))
        if len(fields) > MAX_FIELDS:
            raise _too_many()
        at = closing.end() if closing[1] == b"," else closing.start(1)
    return fields


def _skip(body: bytes, at: int) -> int:
    """The end of the JSON value that begins at `at`, without the white space after it."""
    depth = 0
    end = at
    for token in _TOKEN.finditer(body, at):
        if end - at > MAX_SKIPPED:
            raise RequestError(400, "a long value is given more than once", code="duplicate_key")
        first = token[0][:1]
        if depth == 0 and first in b",}]" and end > at:
            break
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
        end = token.end()
        if depth == 0 and first in b'}]"':
            break
    return at + len(body[at:end].rstrip())


def _too_many() -> RequestError:
    return RequestError(400, f"the body has more than {MAX_FIELDS} fields", code="too_many_fields")

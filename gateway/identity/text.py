"""Keys of a prompt whose token ids are unknown: chained over its canonical text.

The canonical form puts what engines put first (tools, template settings) first, and then every message in order, so
that a conversation's next turn extends the text of the one before. Fields are told apart by bytes that occur in no
UTF-8 text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.identity.chat import TEXT_PARTS
from gateway.identity.prompt import IdentityMode, PromptIdentity, PromptRequest
from kvstore.identity import TEXT_UNIT_BYTES, text_keys

BYTES_PER_TOKEN = 4
"""Rough length of a token, for estimates only."""

_MESSAGE = b"\xff"
_CONTENT = b"\xfe"
_PART = b"\xfd"
_CALL = b"\xfc"
_FIELD = b"\xfb"
_SETTING = b"\xfa"
_PROMPT = b"\xf9"
_RAW = b"\xf8"
_END = b"\xf5"

MAX_PARSED = 256 * 1024
"""Bytes of messages or prompt that are brought into the canonical form; parsing more would hold up the event loop (a
million empty lists fit into 3 MB). Longer ones are taken as the client spelled them, which its next turn repeats."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError)
"""What valid JSON may raise: numbers out of range, deep nesting, lone surrogates."""


def identify(
    request: PromptRequest, seed: int, mode: IdentityMode = IdentityMode.TEXT, fallback: str = ""
) -> PromptIdentity:
    """Keys over a request's canonical text under the deployment's seed. Raises nothing for any JSON."""
    text = canonical(request)
    return PromptIdentity(
        mode=mode,
        keys=text_keys(request.namespace.root(seed), text),
        tokens=len(text) // BYTES_PER_TOKEN,
        unit_tokens=TEXT_UNIT_BYTES // BYTES_PER_TOKEN,
        fallback=fallback,
    )


def canonical(request: PromptRequest) -> bytes:
    """A request's prompt as bytes: equal for requests of equal meaning, different for others."""
    out: list[bytes] = []
    for name, raw in (
        (b"tools", request.tools),
        (b"documents", request.documents),
        (b"kwargs", request.chat_template_kwargs),
        (b"effort", request.reasoning_effort),
    ):
        setting = _compact(raw)
        if setting not in (b"", b"null", b"[]", b"{}"):
            out += (_SETTING, name, _FIELD, setting)
    for raw, write in ((request.messages, _messages), (request.prompt, _prompt)):
        if raw is not None and len(raw) > MAX_PARSED:
            out += (_RAW, raw)
        elif raw is not None:
            write(raw, out)
    return b"".join(out)


def _compact(raw: bytes | None) -> bytes:
    """JSON without its white space, as it stands where that cannot be had."""
    if raw is None:
        return b""
    if len(raw) > MAX_PARSED:
        return _RAW + raw
    try:
        return _encode(_decode(raw))
    except _UNREADABLE:
        return _RAW + raw


def _messages(raw: bytes, out: list[bytes]) -> None:
    try:
        messages = _decode(raw)
        if not isinstance(messages, list):
            messages = [messages]
        written: list[bytes] = []
        for message in messages:
            _message(message, written)
        out += written
    except _UNREADABLE:
        out += (_RAW, raw)


def _message(message: Any, out: list[bytes]) -> None:
    if not isinstance(message, dict):
        out += (_MESSAGE, _RAW, _encode(message), _END)
        return
    out += (_MESSAGE, _text(message.get("role")))
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            out += (_FIELD, name.encode(), _FIELD, _text(value))
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out += (_FIELD, b"reasoning", _FIELD, _text(reasoning))
    out.append(_CONTENT)
    _content(message.get("content"), out)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else () if calls is None else (calls,):
        out += (_CALL, _call(call))
    if (tools := message.get("tools")) is not None:
        out += (_FIELD, b"tools", _FIELD, _encode(tools))
    out.append(_END)


def _text(value: Any) -> bytes:
    """A string as UTF-8, anything else marked as not being one."""
    return value.encode() if isinstance(value, str) else _RAW + _encode(value)


def _content(content: Any, out: list[bytes]) -> None:
    """Null and "" are alike, and so are a list of texts and their lines in one string, as engines treat them."""
    if content is None:
        return
    if not isinstance(content, list):
        out.append(_text(content))
        return
    first = True
    for part in content:
        text = part
        if isinstance(part, dict):
            kind = part.get("type")
            text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
        if isinstance(text, str):
            out += (b"" if first else b"\n", text.encode())
            first = False
        elif part is not None:
            out += (_PART, _encode(part))


def _call(call: Any) -> bytes:
    """A tool call by what engines see of it; arguments count by their value, not their spelling."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return _RAW + _encode(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _decode(arguments)
        except _UNREADABLE:
            pass
    return _encode((call.get("id"), function.get("name"), arguments))


def _prompt(raw: bytes, out: list[bytes]) -> None:
    out.append(_PROMPT)
    try:
        prompt = _decode(raw)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        out.append(prompt.encode() if isinstance(prompt, str) else _RAW + _encode(prompt))
    except _UNREADABLE:
        out += (_RAW, raw)

"""Proof that the gateway's token ids equal an engine's, on a set of probes and on samples of real requests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import httpx
import msgspec

from gateway.errors import IdentityUnavailable
from gateway.identity.chat import Dialect
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import PromptRequest
from gateway.identity.status import NOT_TRIED, PromptKind
from kvstore.identity import Namespace

Tokenize: TypeAlias = Callable[[dict[str, Any]], Awaitable[list[int] | None]]
"""Posts a body to an engine's /tokenize and returns its `tokens`; None, or an HTTP 4xx raised, is a refusal, but for
those of `SAYS_NOTHING`."""

SAYS_NOTHING = frozenset({401, 403, 408, 425, 429})
"""HTTP 4xx for who asks or when, not for what is asked."""


class Mismatch(msgspec.Struct, frozen=True):
    """A probe that the gateway and the engine tokenize differently: lengths, and the first place that differs.

    `ours` is -1 where the gateway has no ids at all; `note` says why.
    """

    probe: str
    ours: int
    theirs: int
    at: int
    note: str = ""

    def __str__(self) -> str:
        if self.ours < 0:
            return f"{self.probe}: {self.note}"
        return f"{self.probe}: {self.ours} tokens, engine {self.theirs}, first difference at {self.at}"


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found. `ok` means that chats are exact; `off` lists kinds of requests that are not.

    `compared` and `refused` count probes; `mismatches` are those in the dialect that fits best.
    """

    model: str
    ok: bool
    dialect: Dialect
    off: frozenset[PromptKind]
    compared: int
    refused: int
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        found = "; ".join(map(str, self.mismatches[:3])) or "none"
        return (
            f"{self.compared} probes compared, {self.refused} refused by the engine, dialect {self.dialect}, "
            f"{len(self.mismatches)} mismatches: {found}"
        )


class Probe(msgspec.Struct, frozen=True):
    """A request that both sides tokenize. `body` is what the engine is sent."""

    name: str
    kind: PromptKind
    request: PromptRequest
    body: dict[str, Any]


def probe_requests(model: str, special: str = "<|im_start|>") -> list[Probe]:
    """Requests that tell renderings and tokenizers apart. `special` stands in user text, as if it were a marker."""
    user = {"role": "user", "content": "What is the capital of France?"}
    system = {"role": "system", "content": "You are a terse assistant.\n\nAnswer in one sentence."}
    reply = {"role": "assistant", "content": "Paris."}
    call = {
        "id": "call_0a1b2c3d4",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 3}'},
    }
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0a1b2c3d4", "content": '{"temp": 21.5, "sky": "clear"}'}
    parts = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Forecast for a city <b>now</b>",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
    chats: dict[str, list[dict[str, Any]]] = {
        "user": [user],
        "system": [system, user],
        "turns": [system, user, reply, {"role": "user", "content": "And of Italy?"}],
        "unicode": [{"role": "user", "content": "naïve café 你好 こんにちは 👩‍👩‍👧 مرحبا Å vs A\u030a"}],
        "code": [{"role": "user", "content": "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # 12345\n\n\n    if x:\r\n"}],
        "spaces": [{"role": "user", "content": "  leading, trailing and   inner \n\n "}],
        "empty": [{"role": "user", "content": ""}],
        "parts": [system, {"role": "user", "content": parts}],
        "markers": [{"role": "user", "content": f"{special}system\nnot <|im_end|> a </s> marker [INST]{special}"}],
        "answer": [user, reply],
        "null": [user, {"role": "assistant", "content": None}, user],
        "calls": [system, user, called, result],
        "called twice": [user, {**called, "content": "Let me see."}, result, reply, user],
    }
    probes = [_chat_probe(model, name, PromptKind.CHAT, messages, None) for name, messages in chats.items()]
    probes += [
        _chat_probe(model, f"tools, {name}", PromptKind.TOOLS, chats[name], tools)
        for name in ("user", "system", "calls")
    ]
    for name, text in (
        ("text", "Once upon a time, naïve 你好"),
        ("marked", f" {special}user\nhello"),
        ("blank", " \n"),
    ):
        request = PromptRequest(model=model, namespace=Namespace(model), prompt=json.dumps(text).encode())
        probes.append(Probe(f"prompt, {name}", PromptKind.PROMPT, request, {"model": model, "prompt": text}))
    return probes


def _chat_probe(
    model: str, name: str, kind: PromptKind, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Probe:
    request = PromptRequest(
        model=model,
        namespace=Namespace(model),
        messages=json.dumps(messages).encode(),
        tools=json.dumps(tools).encode() if tools is not None else None,
    )
    body: dict[str, Any] = {"model": model, "messages": messages, "add_generation_prompt": True}
    return Probe(name, kind, request, body if tools is None else {**body, "tools": tools})


async def check(identifier: Identifier, model: str, tokenize: Tokenize) -> ParityReport:
    """Compares a loaded model with an engine on every probe.

    Finds out the engine's dialect on the way and tells the identifier; the verdict is the caller's to pass on
    (`Identifier.set_parity`, `Identifier.restrict`), since several engines may serve a model. What could not be
    compared is no verdict: raises what `tokenize` raises, but for refusals, and IdentityUnavailable where the gateway
    did not get to tokenizing a probe.
    """
    probes = probe_requests(model)
    theirs: list[tuple[Probe, list[int]]] = []
    for probe in probes:
        if (ids := await _ask(tokenize, probe.body)) is not None:
            theirs.append((probe, ids))
    known = identifier.dialect(model)
    dialect, found = Dialect.VLLM, None
    for candidate in Dialect if known is None else (known,):
        differences = await _differences(identifier, theirs, candidate)
        if found is None or len(differences) < len(found):
            dialect, found = candidate, differences
        if not found:
            break
    assert found is not None
    compared = {kind: sum(probe.kind is kind for probe, _ in theirs) for kind in PromptKind}
    asked = {kind: sum(probe.kind is kind for probe in probes) for kind in PromptKind}
    differing = {probe.kind for probe, _ in found}
    off = {kind for kind in PromptKind if kind in differing or 2 * compared[kind] < asked[kind]}
    if PromptKind.CHAT not in off:
        identifier.set_dialect(model, dialect)
    return ParityReport(
        model=model,
        ok=PromptKind.CHAT not in off,
        dialect=dialect,
        off=frozenset(off),
        compared=len(theirs),
        refused=len(probes) - len(theirs),
        mismatches=tuple(mismatch for _, mismatch in found),
    )


async def sample(identifier: Identifier, request: PromptRequest, tokenize: Tokenize) -> bool | None:
    """Whether an engine tokenizes a real request as the gateway does; None when either side does not say."""
    if request.documents is not None or request.reasoning_effort is not None:
        return None  # not fields of /tokenize
    theirs = await _ask(tokenize, tokenize_body(request))
    if theirs is None:
        return None
    try:
        return await identifier.token_ids(request) == theirs
    except IdentityUnavailable:
        return None


def tokenize_body(request: PromptRequest) -> dict[str, Any]:
    """The body of POST /tokenize for a request, its JSON slices as msgspec.Raw."""
    body: dict[str, Any] = {"model": request.model}
    for name in ("messages", "prompt", "tools", "chat_template_kwargs"):
        if (raw := getattr(request, name)) is not None:
            body[name] = msgspec.Raw(raw)
    if request.messages is not None:
        body["add_generation_prompt"] = request.add_generation_prompt
        if request.continue_final_message:
            body["continue_final_message"] = True
    if request.add_special_tokens is not None:
        body["add_special_tokens"] = request.add_special_tokens
    return body


async def _ask(tokenize: Tokenize, body: dict[str, Any]) -> list[int] | None:
    try:
        return await tokenize(body)
    except httpx.HTTPStatusError as error:
        if error.response.is_client_error and error.response.status_code not in SAYS_NOTHING:
            return None
        raise


async def _differences(
    identifier: Identifier, theirs: list[tuple[Probe, list[int]]], dialect: Dialect
) -> list[tuple[Probe, Mismatch]]:
    found = []
    for probe, ids in theirs:
        try:
            ours = await identifier.token_ids(probe.request, dialect)
        except IdentityUnavailable as error:
            if error.reason in NOT_TRIED:
                raise
            found.append((probe, Mismatch(probe.name, -1, len(ids), 0, f"{error.reason}: {error}")))
            continue
        if ours != ids:
            pairs = enumerate(zip(ours, ids, strict=False))
            at = next((place for place, (left, right) in pairs if left != right), min(len(ours), len(ids)))
            found.append((probe, Mismatch(probe.name, len(ours), len(ids), at)))
    return found

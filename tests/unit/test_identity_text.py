"""Canonical text: equal for equal meaning, different otherwise, extended by the next turn, total."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from identity_support import SEED, TOOLS, chat, completion

from gateway.identity.prompt import IdentityMode, PromptRequest
from gateway.identity.text import canonical, identify
from kvstore.identity import Namespace

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "hello"}
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def same(*contents: Any) -> None:
    texts = {canonical(chat([{"role": "user", "content": content}])) for content in contents}
    assert len(texts) == 1


def test_equal_text_is_equal() -> None:
    same(None, "", [])
    same("a\nb", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a", {"type": "text", "text": "b"}])
    assert canonical(chat([{"role": "user"}])) == canonical(chat([{"role": "user", "content": None}]))
    spaced = PromptRequest(
        model="m", namespace=Namespace("m"), messages=b' [ {"content" : "h\\u0069","role":"user"} ] '
    )
    assert canonical(spaced) == canonical(chat([{"role": "user", "content": "hi"}]))


def test_spelling_of_arguments_and_empty_settings_do_not_count() -> None:
    other = {**CALL, "index": 0, "function": {"name": "f", "arguments": '{"a":1}'}}
    one, two = ({"role": "assistant", "content": None, "tool_calls": [call]} for call in (CALL, other))
    assert canonical(chat([one])) == canonical(chat([{**two, "annotations": [], "refusal": None}]))
    assert canonical(chat([USER], tools=[], chat_template_kwargs={})) == canonical(chat([USER]))


def test_whatever_an_engine_sees_counts() -> None:
    requests = [
        chat([USER]),
        chat([{**USER, "role": "system"}]),
        chat([{**USER, "name": "bob"}]),
        chat([{**USER, "tool_call_id": "bob"}]),
        chat([{**USER, "reasoning": "bob"}]),
        chat([{**USER, "tool_calls": [CALL]}]),
        chat([{**USER, "tool_calls": [{**CALL, "id": "c2"}]}]),
        chat([{**USER, "content": "hello "}]),
        chat(
            [{**USER, "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "a"}}]}]
        ),
        chat(
            [{**USER, "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "b"}}]}]
        ),
        chat([USER, USER]),
        chat([{**USER, "content": ["hello", "hello"]}]),
        chat([USER, {"role": "assistant", "content": ""}]),
        chat([USER], tools=TOOLS),
        chat([USER], documents=TOOLS),
        chat([USER], chat_template_kwargs={"a": TOOLS}),
        chat([USER], reasoning_effort=b'"low"'),
        chat([{**USER, "content": "hello", "role": "userhello"}]),
        completion("hello"),
        completion([1, 2, 3]),
        completion([1, 2, 34]),
    ]
    for left, right in combinations(requests, 2):
        assert canonical(left) != canonical(right)


def test_namespaces_are_apart() -> None:
    long = [{"role": "user", "content": "x" * 2000}]
    found = {
        tuple(identify(chat(long, **names), seed).keys)
        for names in ({}, {"model": "other"}, {"lora": "a"}, {"salt": "a"})
        for seed in (SEED, SEED + 1)
    }
    assert len(found) == 8


def test_the_next_turn_extends_the_keys() -> None:
    messages = [{"role": "system", "content": "s" * 900}, {"role": "user", "content": "u" * 900}]
    more = [*messages, {"role": "assistant", "content": "a" * 900}, {"role": "user", "content": "v" * 900}]
    before, after = (identify(chat(m, tools=TOOLS), SEED).keys for m in (messages, more))
    assert len(before) >= 7
    assert after[: len(before)] == before
    other = [messages[0], {"role": "user", "content": "u" * 300 + "another question"}]
    shared = sum(
        left == right for left, right in zip(before, identify(chat(other, tools=TOOLS), SEED).keys, strict=False)
    )
    assert 4 <= shared < len(before)


def test_several_prompts_are_named_by_the_first() -> None:
    assert canonical(completion("hello")) == canonical(completion(["hello", "you"]))
    assert canonical(completion([[1, 2], [3]])) == canonical(completion([1, 2]))


def test_length_is_estimated() -> None:
    identity = identify(completion("x" * 4000), SEED, IdentityMode.HASH, "no_agent")
    assert (identity.mode, identity.fallback, identity.unit_tokens) == (IdentityMode.HASH, "no_agent", 64)
    assert identity.tokens == pytest.approx(1000, abs=5)
    assert len(identity.keys) == 15


@given(ANY, ANY, ANY)
def test_any_json_has_keys(messages: Any, tools: Any, prompt: Any) -> None:
    raw = [json.dumps(value).encode() for value in (messages, tools, prompt)]
    for request in (
        PromptRequest(model="m", namespace=Namespace("m"), messages=raw[0], tools=raw[1], documents=raw[2]),
        PromptRequest(model="m", namespace=Namespace("m"), prompt=raw[2], chat_template_kwargs=raw[1]),
        chat(
            [
                {"role": messages, "content": tools, "tool_calls": prompt, "name": tools},
                {"role": "user", "content": [prompt]},
            ]
        ),
        chat(
            [{"role": "assistant", "tool_calls": [{"id": messages, "function": {"name": tools, "arguments": prompt}}]}]
        ),
    ):
        assert identify(request, SEED).keys == identify(request, SEED).keys


@pytest.mark.parametrize(
    "raw", [b'["\\ud800"]', b"[1e999]", b"[" * 5000 + b"]" * 5000, b"[123456789012345678901234567890123]", b"", b"\xff"]
)
def test_json_that_decoders_refuse_has_keys(raw: bytes) -> None:
    for name in ("messages", "prompt", "tools"):
        fields: dict[str, Any] = {name: raw}
        request = PromptRequest(model="m", namespace=Namespace("m"), **fields)
        assert canonical(request) or not raw

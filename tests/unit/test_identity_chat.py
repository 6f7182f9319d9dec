"""How engines rewrite a chat before its template sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from identity_support import TOOLS, chat

from gateway.errors import IdentityUnavailable
from gateway.identity.chat import Dialect, conversation, variables

CALL = {"index": 0, "type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"b": 1, "a": "ü"}'}}


def seen(message: dict[str, Any], dialect: Dialect = Dialect.VLLM, lists: bool = False) -> dict[str, Any]:
    return conversation(json.dumps([message]).encode(), dialect, lists, developer=True)[0]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ("hello", "hello"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": None}, {"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_every_form_of_text_is_one_text(dialect: Dialect, content: Any, text: str) -> None:
    assert seen({"role": "user", "content": content}, dialect)["content"] == text


def test_absent_content_is_empty() -> None:
    assert seen({"role": "assistant"})["content"] == ""


def test_templates_that_iterate_get_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for dialect in Dialect:
        assert seen({"role": "user", "content": parts}, dialect, lists=True)["content"] == parts
    assert seen({"role": "user", "content": "a"}, Dialect.VLLM, lists=True)["content"] == parts[:1]
    assert seen({"role": "user", "content": "a"}, Dialect.PLAIN, lists=True)["content"] == "a"
    assert seen({"role": "tool", "content": parts}, Dialect.VLLM, lists=True)["content"] == "a\nb"


def test_tool_calls_are_written_in_the_engine_s_order() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
    (call,) = seen(message)["tool_calls"]
    assert (
        json.dumps(call)
        == '{"id": "c1", "function": {"arguments": {"b": 1, "a": "\\u00fc"}, "name": "f"}, "type": "function"}'
    )
    assert "annotations" not in seen(message)
    (call,) = seen(message, Dialect.PLAIN)["tool_calls"]
    assert list(call) == list(CALL)
    assert call["function"] == {"name": "f", "arguments": {"b": 1, "a": "ü"}}


@pytest.mark.parametrize("arguments", ["", "{not json", "[1]", "7", None])
def test_arguments_that_are_no_object_count_as_none_for_vllm(arguments: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}
    assert seen(message)["tool_calls"][0]["function"]["arguments"] == {}


def test_empty_tool_calls_are_dropped() -> None:
    for dialect in Dialect:
        assert "tool_calls" not in seen({"role": "assistant", "content": "x", "tool_calls": []}, dialect)
        assert "tool_calls" not in seen({"role": "assistant", "content": "x", "tool_calls": None}, dialect)


def test_tools_are_filled_up_for_vllm() -> None:
    bare = [{"function": {"name": "f", "extra": 1}, "type": "function"}]
    request = chat([], tools=bare)
    assert json.dumps(variables(request, Dialect.VLLM)["tools"]) == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]'
    )
    assert variables(request, Dialect.PLAIN)["tools"] == bare
    assert json.dumps(variables(chat([], tools=TOOLS), Dialect.VLLM)["tools"]) == json.dumps(TOOLS)


def test_developer_becomes_the_one_system_message_where_it_is_unknown() -> None:
    raw = json.dumps(
        [
            {"role": "system", "content": "one"},
            {"role": "user", "content": "q"},
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        ]
    ).encode()
    merged = [{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "q"}]
    assert conversation(raw, Dialect.VLLM, lists=False, developer=False) == merged
    assert [m["role"] for m in conversation(raw, Dialect.VLLM, lists=False, developer=True)][-1] == "developer"


def test_a_client_s_changing_first_line_does_not_count() -> None:
    billed = seen({"role": "system", "content": "x-anthropic-billing-header: cch=1234;\nYou are helpful."})
    assert billed["content"] == "You are helpful."


def test_reasoning_is_seen_under_every_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = seen({"role": "assistant", "content": "x", name: "because"})
        assert message["reasoning"] == message["reasoning_content"] == message["thinking"] == "because"


def test_effort_switches_thinking() -> None:
    request = chat([], chat_template_kwargs={"a": 1}, reasoning_effort=b'"none"')
    found = variables(request, Dialect.VLLM)
    assert (found["enable_thinking"], found["reasoning_effort"], found["a"]) == (False, "none", 1)
    own = chat([], chat_template_kwargs={"enable_thinking": True}, reasoning_effort=b'"none"')
    assert variables(own, Dialect.VLLM)["enable_thinking"] is True


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "nonsense", None, 7])
def test_parts_that_are_not_text_are_unsupported(kind: Any) -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        seen({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, "image_url": {"url": "x"}}]})
    assert refusal.value.reason == "unsupported_content"


@pytest.mark.parametrize(
    "raw",
    [b"{}", b"7", b"[1]", b'[{"content": "x"}]', b'[{"role": 7}]', b'[{"role": "user", "content": 7}]', b"[" * 100_000],
)
@pytest.mark.parametrize("dialect", Dialect)
def test_what_an_engine_refuses_is_a_bad_request(raw: bytes, dialect: Dialect) -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        conversation(raw, dialect, lists=False, developer=True)
    assert refusal.value.reason == "bad_request"


def test_kwargs_that_name_the_renderer_s_arguments_are_unsupported() -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        variables(chat([], chat_template_kwargs={"messages": []}), Dialect.VLLM)
    assert refusal.value.reason == "unsupported_kwargs"

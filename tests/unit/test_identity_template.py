"""Rendering against transformers, and what is read from a template's syntax."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from identity_support import CHATML_TOOLS, HEADERS_AND_DATE, PARTS, TOOLS, judge, model_files

from gateway.errors import IdentityUnavailable
from gateway.identity.template import ChatTemplate

SPECIAL = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": [1, 2]}},
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hello <b>you</b> & 'me'\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 你好"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ],
]


@cache
def smollm2() -> Any:
    return judge("smollm2")


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(smollm2().apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def test_the_judge_names_the_same_special_tokens() -> None:
    assert model_files("smollm2").special_tokens == SPECIAL == smollm2().special_tokens_map


@pytest.mark.parametrize("template", [CHATML_TOOLS, HEADERS_AND_DATE, PARTS], ids=["chatml", "headers", "parts"])
@pytest.mark.parametrize("messages", CHATS, ids=["user", "system", "tools"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["ask", "keep"])
def test_renders_as_transformers_does(template: str, messages: Any, tools: Any, prompt: bool) -> None:
    ours = ChatTemplate(template, SPECIAL)
    for extra in ({}, {"enable_thinking": False, "date": "1999"}):
        variables = {"tools": tools, "documents": None, "add_generation_prompt": prompt, **extra}
        text = ours.render(messages, variables, continues=False)
        assert text == theirs(template, messages, tools=tools, add_generation_prompt=prompt, **extra)


@pytest.mark.parametrize("template", [CHATML_TOOLS, HEADERS_AND_DATE, PARTS], ids=["chatml", "headers", "parts"])
@pytest.mark.parametrize("start", ["So far", "trailing space ", "two\n\n"])
def test_continues_a_final_message_as_transformers_does(template: str, start: str) -> None:
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": start}]
    variables = {"tools": None, "add_generation_prompt": False}
    text = ChatTemplate(template, SPECIAL).render(messages, variables, continues=True)
    assert text == theirs(template, messages, continue_final_message=True)
    assert messages[-1]["content"] == start


def test_what_a_template_raises_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(IdentityUnavailable, match="roles must alternate") as refusal:
        template.render([], {}, continues=False)
    assert refusal.value.reason == "template_error"


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 + '' }}"])
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {}, continues=False)
    assert refusal.value.reason == "template_error"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nothing %}"])
def test_what_does_not_compile_is_refused(source: str) -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        ChatTemplate(source, {})
    assert refusal.value.reason == "bad_template"


@pytest.mark.parametrize(
    ("source", "lists"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}x{% endfor %}{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}x{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
        (
            "{% macro show(it) %}{% for p in it %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tool_calls) }}{% endfor %}",
            False,
        ),
        (CHATML_TOOLS, False),
        (PARTS, True),
    ],
)
def test_whether_a_template_wants_parts_is_read_from_its_syntax(source: str, lists: bool) -> None:
    assert ChatTemplate(source, {}).lists is lists

"""A chat request's fields as an engine hands them to its template.

Engines rewrite messages before they render them, and differ in how. `Dialect` names the known ways; which one a replica
speaks is found out by comparing token ids with it (`gateway.identity.parity`).
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from gateway.errors import IdentityUnavailable
from gateway.identity.prompt import PromptRequest

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of content parts that are text, with the field that holds it."""

_BILLING = "x-anthropic-billing-header"
_OWN_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
"""Arguments of the renderer itself: an engine takes such a template kwarg for the argument, or refuses it."""


class Dialect(StrEnum):
    """How an engine rewrites a chat before its template sees it."""

    VLLM = "vllm"
    """Known fields only, in the order of its own types; absent tool fields are null; strings become parts for
    templates that iterate; `developer` becomes `system` for templates that do not know it. Source: vLLM 0.32.0,
    vllm/renderers/chat_utils.py and hf.py, vllm/entrypoints/openai/chat_completion/protocol.py."""
    PLAIN = "plain"
    """What the client sent, save null content, lists of text where a template wants strings, and parsed arguments."""


def variables(request: PromptRequest, dialect: Dialect) -> dict[str, Any]:
    """The template's variables besides messages and special tokens. Raises IdentityUnavailable."""
    kwargs = _json(request.chat_template_kwargs) or {}
    if not isinstance(kwargs, dict):
        raise IdentityUnavailable("bad_request", "chat_template_kwargs is not an object")
    if _OWN_VARIABLES & kwargs.keys():
        raise IdentityUnavailable("unsupported_kwargs", "chat_template_kwargs names an argument of the renderer")
    effort = _json(request.reasoning_effort)
    if effort is not None:
        kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
    tools = _json(request.tools)
    if isinstance(tools, list) and dialect is Dialect.VLLM:
        tools = [_vllm_tool(tool) for tool in tools]
    return {
        **kwargs,
        "tools": tools,
        "documents": _json(request.documents),
        "add_generation_prompt": request.add_generation_prompt,
    }


def conversation(raw: bytes, dialect: Dialect, lists: bool, developer: bool) -> list[dict[str, Any]]:
    """The messages as the template sees them; `lists` and `developer` describe the template (see `ChatTemplate`).

    Raises IdentityUnavailable: "bad_request" where an engine would refuse, "unsupported_content" for parts that are
    not text.
    """
    messages = _json(raw)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise IdentityUnavailable("bad_request", "messages is not a list of objects")
    if dialect is Dialect.PLAIN:
        return [_plain(message, lists) for message in messages]
    seen = [_vllm(message, lists) for message in messages]
    if not developer and any(message["role"] == "developer" for message in seen):
        return _one_system(seen)
    return seen


def _json(raw: bytes | None) -> Any:
    if raw is None:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IdentityUnavailable("bad_request", str(error)) from error


def _texts(content: Any) -> list[str]:
    """The texts of a content in any form that clients send."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise IdentityUnavailable("bad_request", f"content is a {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise IdentityUnavailable("unsupported_content", f"content part of type {kind!r}")
        text = part.get(field)
        if isinstance(text, str):
            texts.append(text)
        elif text is not None or kind not in ("text", "refusal"):
            raise IdentityUnavailable("bad_request", f"content part of type {kind!r} without text")
    return texts


def _role(message: dict[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise IdentityUnavailable("bad_request", "a message without a role")
    return role


def _parts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _arguments(value: Any) -> Any:
    """Arguments as a mapping: a string that holds a JSON object is parsed, all else counts as none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _reasoning(message: dict[str, Any]) -> Any:
    return next((message[name] for name in ("reasoning", "reasoning_content") if message.get(name) is not None), None)


def _vllm(message: dict[str, Any], lists: bool) -> dict[str, Any]:
    role = _role(message)
    texts = _texts(message.get("content"))
    if role == "system":
        texts = [rest for rest in map(_without_billing, texts) if rest is not None]
    # The results of tools are joined for every template: few iterate over them.
    seen: dict[str, Any] = {"role": role, "content": _parts(texts) if lists and role != "tool" else "\n".join(texts)}
    calls = message.get("tool_calls")
    if role == "assistant":
        if calls is not None:
            if not isinstance(calls, list):
                raise IdentityUnavailable("bad_request", "tool_calls is not a list")
            if calls:
                seen["tool_calls"] = [_vllm_call(call) for call in calls]
        if (reasoning := _reasoning(message)) is not None:
            seen |= {"thinking": reasoning, "reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and message.get("tool_call_id") is not None:
        seen["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            seen[name] = message[name]
    if role == "developer" and message.get("tools") is not None:
        seen["tools"] = message["tools"]
    return seen


def _vllm_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise IdentityUnavailable("bad_request", "a tool call that is not of a function")
    known = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    return {"id": call.get("id"), "function": known, "type": "function"}


def _vllm_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise IdentityUnavailable("bad_request", "a tool without a function")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    known |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    seen: dict[str, Any] = {"type": "function", "function": known}
    if (deferred := tool.get("defer_loading")) is not None:
        seen["defer_loading"] = deferred
        known.setdefault("defer_loading", deferred)
    return seen


def _without_billing(text: str) -> str | None:
    """A system text without the first line that a coding client changes on every request; None if none is left."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2] or None


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system messages, and all of those as one at the front."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = []
    for place in places:
        content = messages[place]["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if content:
            texts.append(content)
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _plain(message: dict[str, Any], lists: bool) -> dict[str, Any]:
    role = _role(message)
    content = message.get("content")
    texts = _texts(content)
    seen = {name: value for name, value in message.items() if value is not None}
    seen["role"] = role
    seen["content"] = _parts(texts) if lists and isinstance(content, list) else "\n".join(texts)
    calls = seen.get("tool_calls")
    if isinstance(calls, list):
        seen["tool_calls"] = [_plain_call(call) for call in calls]
        if not calls:
            del seen["tool_calls"]
    if (reasoning := _reasoning(message)) is not None:
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or {}
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}

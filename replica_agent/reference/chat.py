"""Text and token ids: the model's own tokenizer and chat template, as transformers applies them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replica_agent.reference.errors import ModelError, RequestError

_OWN_ARGUMENTS = frozenset({"conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize"})


class Tokenizer:
    """A model directory's tokenizer. Holds no state between calls; safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            self._outer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self._inner = self._outer.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{directory}: no usable tokenizer: {str(error).splitlines()[0]}") from error
        self.vocab_size: int = self._inner.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become replacement characters."""
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises RequestError naming the message that cannot be rendered."""
        if self._outer.chat_template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        kwargs = dict(template_kwargs or {})
        if clash := _OWN_ARGUMENTS & kwargs.keys():
            raise RequestError(f"{min(clash)} cannot be given here", "chat_template_kwargs")
        try:
            text = self._outer.apply_chat_template(
                [_normalized(message, f"messages[{index}]") for index, message in enumerate(messages)],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except RequestError:
            raise
        except Exception as error:
            # A template is a program that the request feeds: whatever it raises is about the request.
            raise RequestError(f"the chat template refused the messages: {error}", "messages") from error
        return str(text)


def _normalized(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as templates expect it: content is text, arguments of tool calls are objects."""
    if not isinstance(message.get("role"), str):
        raise RequestError("role must be a string", f"{where}.role")
    result = {**message, "content": _text(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        if calls:
            result["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        else:
            del result["tool_calls"]
    return result


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content must be a string, a list of parts or null", where)
    parts = []
    for index, part in enumerate(content):
        text = part if isinstance(part, str) else None
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
        if not isinstance(text, str):
            raise RequestError("only text parts are supported", f"{where}[{index}]")
        parts.append(text)
    return "\n".join(parts)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("a tool call needs a function", where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"arguments are not JSON: {error}", f"{where}.function.arguments") from error
    return {**call, "function": {**function, "arguments": arguments}}

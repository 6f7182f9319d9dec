"""OpenAI's response bodies: whole answers and stream chunks of chats and completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from replica_agent.reference.errors import EngineDownError
from replica_agent.reference.generation import Generation

_encode = msgspec.json.encode


class Answer:
    """Writes one request's answer. `chat` selects between the two endpoints' shapes."""

    def __init__(self, generation: Generation, request_id: str, model: str, *, chat: bool) -> None:
        self._generation = generation
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        texts: dict[int, list[str]] = {}
        reasons: dict[int, str | None] = {}
        async for index, output in self._generation.outputs():
            texts.setdefault(index, []).append(output.text)
            reasons[index] = output.finish
        choices = []
        for index in sorted(texts):
            text = "".join(texts[index])
            body = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, **body, "logprobs": None, "finish_reason": reasons[index]})
        return {**self._head, "choices": choices, "usage": self._generation.usage()}

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events. Nothing is sent before the first token exists."""
        if self._chat:
            self._head["object"] = "chat.completion.chunk"
        begun: set[int] = set()
        try:
            async for index, output in self._generation.outputs():
                if self._chat and index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
                # A token that completes no character yet has nothing to show.
                if output.text or output.finish:
                    delta = {"content": output.text} if output.text else {}
                    body: dict[str, Any] = {"delta": delta} if self._chat else {"text": output.text}
                    yield self._chunk(index, body, output.finish)
        except EngineDownError as error:
            yield _event({"error": error_body(str(error), "server_error")})
            return
        if include_usage:
            yield _event({**self._head, "choices": [], "usage": self._generation.usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, body: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
        return _event({**self._head, "choices": [choice]})


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"message": message, "type": kind, "param": param, "code": code}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"

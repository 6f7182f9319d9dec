"""First step: read the body within its limits, understand it, and decide whether it may come in."""

from __future__ import annotations

import asyncio

from gateway.errors import RequestError, no_replica
from gateway.fleet.fleet import Fleet
from gateway.identity.prompt import PromptRequest
from gateway.path.body import Body
from gateway.path.exchange import Exchange
from gateway.path.target import target
from gateway.settings import LimitSettings
from kvstore.identity import Namespace

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Admission:
    """Bounds what is in the gateway at once. Owns the count of admitted requests."""

    def __init__(self, fleet: Fleet, limits: LimitSettings) -> None:
        self._fleet = fleet
        self._limits = limits
        self.admitted = 0

    async def admit(self, exchange: Exchange) -> None:
        """Fill in `target`, `body`, `model`, `stream` and `prompt`. Raises RequestError or ClientGone."""
        exchange.target = target(exchange.scope)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                raw = await self._read(exchange)
        except TimeoutError as error:
            raise RequestError(408, "the body did not arrive in time", code="body_timeout") from error
        exchange.body = body = Body(raw)
        model = body.string("model")
        if not model:
            raise RequestError(400, "model is required", param="model", code="missing_field")
        if not self._fleet.knows(model):
            self._refuse_model(model)
        exchange.model = model
        exchange.stream = body.flag("stream")
        exchange.prompt = prompt_request(exchange.path, model, body)

    def enter(self) -> None:
        """Count one request in. Raises RequestError 429 at the bound; `leave` must follow otherwise."""
        if self.admitted >= self._limits.max_concurrent_requests:
            raise RequestError(
                429,
                f"the gateway is answering {self.admitted} requests already",
                type="rate_limit_error",
                code="overloaded",
                retry_after=1.0,
            )
        self.admitted += 1

    def leave(self) -> None:
        """Count it out."""
        self.admitted -= 1

    def _refuse_model(self, model: str) -> None:
        if not self._fleet.models():
            raise no_replica("no engine is up yet")
        known = ", ".join(sorted(self._fleet.models()))
        raise RequestError(
            404, f"model {model[:200]!r} does not exist; served here: {known}", param="model", code="model_not_found"
        )

    async def _read(self, exchange: Exchange) -> bytes:
        limit = self._limits.max_body_bytes
        for name, value in exchange.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is over the limit of {limit} bytes", code="body_too_large")


def prompt_request(path: str, model: str, body: Body) -> PromptRequest | None:
    """What identifies the prompt; None for endpoints whose prompts leave no reusable KV. Raises RequestError 400."""
    if path == CHAT:
        messages, prompt = body.get("messages"), None
        if messages is None:
            raise RequestError(400, "messages is required", param="messages", code="missing_field")
    elif path == COMPLETIONS:
        messages, prompt = None, body.get("prompt")
        if prompt is None:
            raise RequestError(400, "prompt is required", param="prompt", code="missing_field")
    else:
        return None
    return PromptRequest(
        model=model,
        namespace=Namespace(model),
        messages=messages,
        prompt=prompt,
        tools=body.get("tools"),
        chat_template_kwargs=body.get("chat_template_kwargs"),
        documents=body.get("documents"),
        reasoning_effort=body.get("reasoning_effort"),
        add_generation_prompt=body.flag("add_generation_prompt", default=True),
        continue_final_message=body.flag("continue_final_message"),
        add_special_tokens=body.flag("add_special_tokens") if body.get("add_special_tokens") else None,
    )

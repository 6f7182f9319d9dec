"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.identity import wire_block_hash
from replica_agent.reference.answers import Answer, error_body
from replica_agent.reference.chat import Tokenizer
from replica_agent.reference.engine import Engine
from replica_agent.reference.errors import EngineDownError, RequestError, UnknownModelError
from replica_agent.reference.generation import Generation
from replica_agent.reference.metrics import Metrics
from replica_agent.reference.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints serve. `root` is the model's directory; `workers` runs tokenizing, off the event loop."""

    engine: Engine
    tokenizer: Tokenizer
    metrics: Metrics
    workers: ThreadPoolExecutor
    model: str
    root: str
    max_model_len: int
    block_bytes: int
    version: str
    debug: bool = False


def build_app(service: Service) -> ASGIApp:
    """The ASGI application over one engine."""
    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/reset_prefix_cache", endpoints.reset, methods=["POST"]),
    ]
    if service.debug:
        routes.append(Route("/debug/blocks", endpoints.blocks, methods=["GET"]))
        routes.append(Route("/debug/check", endpoints.check, methods=["GET"]))
    handlers: dict[Any, Callable[..., Any]] = {
        RequestError: _refused,
        EngineDownError: _down,
        HTTPException: _http_error,
        ClientDisconnect: _gone,
        Exception: _failed,
    }
    return _RequestId(Starlette(routes=routes, exception_handlers=handlers))


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await request.body())
        self._check_model(body.model)
        body.check()
        tokens = await self._work(lambda: self._chat_tokens(body))
        return await self._generate(request, body, [tokens], chat=True)

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await request.body())
        self._check_model(body.model)
        body.check()
        special = body.add_special_tokens is not False
        prompts = [
            self._checked_ids(prompt, "prompt")
            if isinstance(prompt, list)
            else await self._work(lambda prompt=prompt: self._service.tokenizer.encode(prompt, special))  # type: ignore[misc]
            for prompt in body.prompts()
        ]
        return await self._generate(request, body, prompts, chat=False)

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeRequest, await request.body())
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either a prompt or messages", "prompt")
        if body.prompt is not None:
            prompt, special = body.prompt, body.add_special_tokens is not False
            tokens = await self._work(lambda: self._service.tokenizer.encode(prompt, special))
        else:
            tokens = await self._work(lambda: self._chat_tokens(body))
        return _json({"count": len(tokens), "max_model_len": self._service.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeRequest, await request.body())
        self._check_model(body.model)
        tokens = self._checked_ids(body.tokens, "tokens")
        return _json({"prompt": await self._work(lambda: self._service.tokenizer.decode(tokens, False))})

    async def models(self, request: Request) -> Response:
        card = {
            "id": self._service.model,
            "object": "model",
            "created": self._started,
            "owned_by": "reference-engine",
            "root": self._service.root,
            "parent": None,
            "max_model_len": self._service.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        if not self._service.engine.alive:
            raise EngineDownError("the compute thread has failed")
        return Response()

    async def version(self, request: Request) -> Response:
        return _json({"version": self._service.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4")

    async def reset(self, request: Request) -> Response:
        await asyncio.wrap_future(self._service.engine.call(self._service.engine.scheduler.clear))
        return Response()

    async def blocks(self, request: Request) -> Response:
        pool = self._service.engine.pool
        cached = await asyncio.wrap_future(self._service.engine.call(pool.cached))
        blocks = [
            {
                "hash": content.hash.hex(),
                "wire_hash": wire_block_hash(content.hash),
                "parent": None if content.parent is None else content.parent.hex(),
                "copies": copies,
                "token_ids": content.tokens,
                "refs": refs,
            }
            for content, copies, refs in cached
        ]
        return _json({"block_size": pool.block_size, "block_bytes": self._service.block_bytes, "blocks": blocks})

    async def check(self, request: Request) -> Response:
        scheduler = self._service.engine.scheduler

        def look() -> dict[str, int]:
            scheduler.check()
            return {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "used_blocks": scheduler.used_blocks,
                "loaded_blocks": scheduler.loaded_blocks,
                "failed_blocks": scheduler.failed_blocks,
            }

        try:
            return _json(await asyncio.wrap_future(self._service.engine.call(look)))
        except AssertionError as error:
            return _error(500, str(error) or "an assertion without words", "server_error", code="broken_law")

    async def _generate(
        self, request: Request, body: ChatRequest | CompletionRequest, prompts: list[list[int]], *, chat: bool
    ) -> Response:
        service = self._service
        if not service.engine.alive:
            raise EngineDownError("the compute thread has failed")
        if not all(prompts):
            raise RequestError("the prompt has no tokens", "messages" if chat else "prompt")
        params = [
            [body.params(len(prompt), service.max_model_len, choice) for choice in range(body.n or 1)]
            for prompt in prompts
        ]
        request_id = request.scope["request_id"]
        hint = body.kv_transfer_params.prefix_gateway if body.kv_transfer_params else None
        generation = Generation(service.engine, prompts, params, body.cache_salt, request_id, hint)
        answer = Answer(generation, request_id, service.model, chat=chat)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return _Stream(generation, answer.stream(include_usage))
        return _json(await _unless_disconnected(request, answer.whole()))

    def _chat_tokens(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        text = self._service.tokenizer.render(
            body.messages or [],
            tools=body.tools,
            add_generation_prompt=(
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
            ),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
        return self._service.tokenizer.encode(text, bool(body.add_special_tokens))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._service.model:
            raise UnknownModelError(name)

    def _checked_ids(self, ids: list[int], field: str) -> list[int]:
        size = self._service.tokenizer.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise RequestError(f"token id {token} is not in the vocabulary of {size}", field)
        return ids

    async def _work(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._service.workers, function)


class _Stream(StreamingResponse):
    """Ends the generation with the response, also when that is cancelled between two chunks."""

    def __init__(self, generation: Generation, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


class _RequestId:
    """Gives every request an id, the client's own where it sent one, and puts it on the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = scope["request_id"] = sent or uuid.uuid4().hex

        async def tag(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, tag)


async def _unless_disconnected(request: Request, answer: Awaitable[_T]) -> _T:
    """Await `answer`, but cancel it when the client goes. Raises EngineDownError then; nobody reads it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(answer)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDownError("the client has gone")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str, kind: str, param: str | None = None, code: str | None = None) -> Response:
    return _json({"error": error_body(message, kind, param, code)}, status)


async def _refused(request: Request, error: RequestError) -> Response:
    return _error(error.status, error.message, error.type, error.param, error.code)


async def _down(request: Request, error: EngineDownError) -> Response:
    return _error(503, str(error), "server_error", code="engine_unavailable")


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _error(error.status_code, error.detail, "invalid_request_error")


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    # In the middle of its own request: there is nobody to answer, and nothing wrong here.
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, "internal error", "server_error")

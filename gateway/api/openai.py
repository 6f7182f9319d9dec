"""The public application: the OpenAI endpoint, health and readiness."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.errors import RequestError, no_replica
from gateway.fleet.fleet import Fleet
from gateway.path import headers

_CODES = {404: "not_found", 405: "method_not_allowed", 422: "invalid_request"}


class PublicApp(FastAPI):
    """FastAPI for everything but the hot path: `POST /v1/*` goes to the request path before any middleware."""

    def __init__(self, request_path: ASGIApp, fleet: Fleet, *, observe_only: bool = False) -> None:
        """`observe_only`: `request_path` refuses whatever comes, and so does everything else under `/v1`."""
        super().__init__(title="prefix-gateway", docs_url=None, redoc_url=None, openapi_url=None)
        self._request_path = request_path
        self._fleet = fleet
        self._observe_only = observe_only
        self.add_api_route("/v1/models", self._models)
        self.add_api_route("/v1/models/{model:path}", self._model)
        self.add_api_route("/health", _health)
        self.add_api_route("/ready", self._ready)
        self.add_exception_handler(RequestError, _request_error)
        self.add_exception_handler(HTTPException, _http_error)
        self.add_exception_handler(RequestValidationError, _validation_error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if engine and (scope["method"] == "POST" or self._observe_only):
            await self._request_path(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": list(self._fleet.models().values())}

    async def _model(self, model: str) -> dict[str, Any]:
        card = self._fleet.models().get(model)
        if card is None:
            raise RequestError(404, f"model {model!r} does not exist", param="model", code="model_not_found")
        return card

    async def _ready(self) -> dict[str, str]:
        if self._observe_only:
            if not self._fleet.observes():
                raise no_replica("no agent's reports are followed yet")
        elif not self._fleet.ready():
            raise no_replica("no engine is up that takes requests")
        return {"status": "ready"}


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _answer(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = _answer(request, RequestError(error.status_code, message, code=_CODES.get(error.status_code)))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _validation_error(request: Request, error: Exception) -> Response:
    return _answer(request, RequestError(422, str(error), code="invalid_request"))


def _answer(request: Request, error: RequestError) -> Response:
    status, sent, body = error_response(error)
    response = Response(body, status)
    response.raw_headers = [*sent, (b"x-request-id", headers.request_id(request.headers.raw).encode())]
    return response

"""The agent's HTTP side."""

from __future__ import annotations

import hmac
import logging

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstore.messages import PROTOCOL_VERSION, ModelFiles
from replica_agent.errors import TooManyReports
from replica_agent.kv.lease_api import lease_routes
from replica_agent.kv.lease_service import LeaseService
from replica_agent.load_api import LoadEndpoint
from replica_agent.metrics import make_registry, metrics_page
from replica_agent.replica import Replica
from replica_agent.telemetry import TraceMiddleware
from replica_agent.tls import VERIFIED

_logger = logging.getLogger(__name__)

JSON = "application/json"
MSGPACK = "application/msgpack"


class TokenMiddleware:
    """Lets `/v1/*` pass with the deployment's token only; `/health` and `/metrics` are for everyone."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or runs the application."""
        if scope["type"] == "http" and self._expected is not None and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = _error(401, "invalid_token", "this agent asks for the deployment's token")
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def warm_up() -> None:
    """Loads what the first streamed response would, and hold the event loop for 30 ms."""
    await run_in_threadpool(lambda: None)


def create_app(replica: Replica) -> Starlette:
    """Routes over one replica. The replica must be running in the same event loop."""
    registry, tls = make_registry(replica), replica.settings.tls

    async def hello(request: Request) -> Response:
        answer = replica.hello()
        if answer is None:
            return _error(503, "engine_unseen", f"the engine at {replica.settings.engine} has not answered yet")
        return _json(200, answer)

    async def model_files(request: Request) -> Response:
        files = replica.files
        if not isinstance(files, ModelFiles):
            return _error(503 if files.code == "engine_unseen" else 404, files.code, str(files))
        tag = f'"{files.digest}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(msgspec.msgpack.encode(files), media_type=MSGPACK, headers={"etag": tag})

    async def reports(request: Request) -> Response:
        spoken = request.query_params.get("protocol", str(PROTOCOL_VERSION))
        if spoken != str(PROTOCOL_VERSION):
            return _error(
                409, "protocol", f"the gateway speaks protocol {spoken:.20}, this agent {PROTOCOL_VERSION}: update both"
            )
        try:
            frames = replica.hub.open()
        except TooManyReports as error:
            return _error(503, "too_many_reports", str(error))
        return StreamingResponse(frames, media_type="application/octet-stream")

    async def health(request: Request) -> Response:
        engine = replica.engine_state()
        return _json(
            200,
            {
                "status": "ok" if engine.up else "engine_down",
                "replica_id": replica.settings.replica_id,
                "engine_up": engine.up,
                "epoch": replica.hub.epoch,
                "blocks": replica.catalogue.blocks,
                "subscribed": replica.subscriber.connected,
                "syncing": replica.subscriber.syncing,
                "problems": replica.problems(),
                "last_event_error": replica.subscriber.last_error,
                "kv": None if replica.kv is None else replica.kv.health(),
            },
        )

    async def fetches(request: Request) -> Response:
        if replica.kv is None:
            return _error(404, "no_pool", "this agent has no KV pool: --kv-socket is not set")
        return _json(200, replica.kv.log.page())

    async def check(request: Request) -> Response:
        try:
            replica.check()
        except AssertionError as error:
            _logger.exception("a law is broken")
            return _error(500, "broken_law", str(error) or "see the log")
        kv = replica.kv
        return _json(
            200,
            {
                "catalogue": msgspec.structs.asdict(replica.catalogue.counts) | {"blocks": replica.catalogue.blocks},
                "kv": None if kv is None else kv.held(),
            },
        )

    async def metrics(request: Request) -> Response:
        return Response(metrics_page(registry), media_type=CONTENT_TYPE_LATEST)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.status_code, "http_error", error.detail)

    async def gone(request: Request, error: Exception) -> Response:
        # In the middle of its own request: there is nobody to answer, and nothing wrong here.
        return Response(status_code=499)

    return Starlette(
        routes=[
            Route("/v1/hello", hello),
            Route("/v1/model-files", model_files),
            Route("/v1/reports", reports),
            Route("/v1/fetches", fetches),
            Route("/v1/load", LoadEndpoint(replica.gateways, replica.hub.announce), methods=["POST"]),
            *lease_routes(LeaseService(None) if replica.kv is None else replica.kv.lease_service),
            Route("/health", health),
            Route("/metrics", metrics),
            *([Route("/debug/check", check)] if replica.settings.debug else []),
        ],
        middleware=[
            Middleware(TraceMiddleware),
            Middleware(CertificateMiddleware, required=tls is not None and tls.required),
            Middleware(TokenMiddleware, token=replica.settings.token),
        ],
        exception_handlers={HTTPException: http_error, ClientDisconnect: gone},
    )


class CertificateMiddleware:
    """Lets `/v1/*` pass with a client's certificate only; the server has seen to it that it is of the authority."""

    def __init__(self, app: ASGIApp, required: bool) -> None:
        self._app = app
        self._required = required

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403 or runs the application."""
        guarded = self._required and scope["type"] == "http" and scope["path"].startswith("/v1/")
        if guarded and not scope.get("state", {}).get(VERIFIED):
            refusal = _error(
                403, "client_certificate", "this agent asks for a certificate of the deployment's authority"
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _error(status: int, code: str, message: str) -> Response:
    return _json(status, {"error": {"code": code, "message": message}})

"""The way of a request through the gateway: admit -> identify -> place -> forward, and account in any case."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from opentelemetry import propagate, trace
from starlette.types import Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.errors import RequestError, UpstreamError
from gateway.path import headers
from gateway.path.account import Account
from gateway.path.admit import Admission, ClientGone
from gateway.path.exchange import Exchange
from gateway.path.forward import Forward
from gateway.path.identify import Identify
from gateway.path.place import Place
from gateway.telemetry import is_tracing

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)


class RequestPath:
    """An ASGI callable for `POST /v1/*`. The whole composition is in `__call__`. Made after tracing was set up."""

    def __init__(
        self, admission: Admission, identify: Identify, place: Place, forward: Forward, account: Account
    ) -> None:
        self._admission = admission
        self._identify = identify
        self._place = place
        self._forward = forward
        self._account = account
        self._tracing = is_tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, headers.request_id(scope["headers"]))
        try:
            self._admission.enter()
        except RequestError as error:
            await self._refuse(exchange, error)
            return
        try:
            with _span(exchange) if self._tracing else contextlib.nullcontext():
                try:
                    await self._admission.admit(exchange)
                    with _child("identify"):
                        await self._identify.identify(exchange)
                    with _child("place"):
                        self._place.place(exchange)
                    with _child("forward"), _until_disconnect(exchange):
                        await self._forward.forward(exchange)
                except RequestError as error:
                    await self._refuse(exchange, error)
                except UpstreamError as error:  # after the answer had begun: the connection is closed on the client
                    exchange.outcome = f"upstream_{error.kind}"
                except ClientGone:
                    exchange.outcome = "client_gone"
                except Exception:
                    log.exception("request %s failed inside the gateway", exchange.request_id)
                    await self._refuse(
                        exchange, RequestError(500, "internal error", type="server_error", code="internal")
                    )
        finally:
            self._admission.leave()
            self._account.close(exchange)

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        exchange.outcome = error.code or "error"
        if exchange.started:
            return
        status, sent, body = error_response(error)
        await exchange.send(
            {"type": "http.response.start", "status": status, "headers": sent + headers.receipt(exchange)}
        )
        await exchange.send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def _span(exchange: Exchange) -> Iterator[None]:
    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"]}
    with tracer.start_as_current_span(
        "gateway.request",
        context=propagate.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={"http.route": exchange.path, "request_id": exchange.request_id},
    ) as span:
        yield
        if span.is_recording() and exchange.placement is not None:
            span.set_attribute("replica", exchange.placement.replica)
            span.set_attribute("reason", exchange.placement.reason)
            span.set_attribute("predicted_cached_tokens", exchange.placement.predicted_cached_tokens)
            if exchange.placement.fetch is not None:
                span.set_attribute("fetch_source", exchange.placement.fetch.source)


def _child(name: str) -> contextlib.AbstractContextManager[object]:
    """A span of one step, only where the request's own is recorded: empty ones cost more than the steps."""
    recording = trace.get_current_span().is_recording()
    return tracer.start_as_current_span(name) if recording else contextlib.nullcontext()


@contextlib.contextmanager
def _until_disconnect(exchange: Exchange) -> Iterator[None]:
    """Cancel the work inside when the client goes away, also while the engine is silent.

    A watcher task is cheaper than racing every read, and it is the only reader of `receive` once the body is read.
    """
    working = asyncio.current_task()
    assert working is not None

    async def watch() -> None:
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        if not exchange.finished:
            exchange.client_gone = True
            working.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not exchange.client_gone or working.uncancel() > 0:
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()

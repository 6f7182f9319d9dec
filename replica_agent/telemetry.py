"""Traces: the caller's W3C context is continued; spans are exported only where OTEL_EXPORTER_OTLP_ENDPOINT is set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EXPORT_AT_EXIT_S = 1.0


def set_up_tracing(environ: Mapping[str, str], replica_id: str) -> Callable[[], None]:
    """Starts exporting where an endpoint is configured. The answer flushes and stops, within about a second."""
    if not environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return lambda: None
    # Imported here: without an endpoint the API alone is enough.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "replica-agent", "service.instance.id": replica_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def stop() -> None:
        # The exporter retries a dead collector for longer than an agent may take to stop.
        thread = threading.Thread(target=provider.shutdown, daemon=True)
        thread.start()
        thread.join(_EXPORT_AT_EXIT_S)

    return stop


@contextmanager
def resync_span(reason: str) -> Iterator[None]:
    """A span around the emptying of the catalogue."""
    with trace.get_tracer("replica_agent").start_as_current_span("kv_events.resync", attributes={"reason": reason}):
        yield


class TraceMiddleware:
    """A server span around every `/v1/*` request, as a child of the caller's; a report stream's lasts as it does.

    None around `/v1/load`: gateways call it up to 200 times a second each, and it belongs to no one request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application inside the span."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["path"] == "/v1/load":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with trace.get_tracer("replica_agent").start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        ) as span:

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, observed)

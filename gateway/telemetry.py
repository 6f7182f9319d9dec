"""OpenTelemetry: spans are made everywhere, and cost next to nothing until an OTLP endpoint is configured."""

from __future__ import annotations

import logging
import threading

from opentelemetry import trace

from gateway.settings import TelemetrySettings

FLUSH_S = 1.0


def start_tracing(settings: TelemetrySettings) -> None:
    """Send spans to `otlp_endpoint` (OTLP over HTTP, the collector's base URL) when it is set."""
    if settings.otlp_endpoint is None:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "prefix-gateway"}), shutdown_on_exit=False)
    endpoint = settings.otlp_endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)


def is_tracing() -> bool:
    """Whether spans go anywhere. Where they do not, even empty ones would cost a tenth of a short request."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


def stop_tracing() -> None:
    """Flush what has not been sent, within about a second: the exporter retries a dead collector for longer."""
    provider = trace.get_tracer_provider()
    if shutdown := getattr(provider, "shutdown", None):
        flushing = threading.Thread(target=shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def start_logging(settings: TelemetrySettings) -> None:
    """One line a record on stderr."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

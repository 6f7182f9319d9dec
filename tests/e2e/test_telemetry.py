"""One trace from the client through the gateway to the agent and the engine, as a real OTLP receiver gets it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback_ports import free_ports
from loopback_server import Handler, LoopbackServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.demo.cluster import Cluster

DEADLINE_S = 60.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector(LoopbackServer):
    """An OTLP/HTTP receiver; `spans` are those that came, by service name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        collector = self

        class Receive(Handler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.body())
                assert self.path == "/v1/traces"
                for resource in request.resource_spans:
                    names = {each.key: each.value.string_value for each in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        collector.spans += [(names["service.name"], span) for span in scope.spans]
                self.answer(ExportTraceServiceResponse().SerializeToString(), "application/x-protobuf")

        super().__init__(Receive)

    def of(self, service: str, name: str) -> list[Span]:
        return [span for from_, span in list(self.spans) if (from_, span.name) == (service, name)]


class EchoEngine(LoopbackServer):
    """An engine that answers one model and keeps the headers of what it is asked."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        engine = self

        class Answer(Handler):
            def do_GET(self) -> None:
                self.answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

            def do_POST(self) -> None:
                self.body()
                engine.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.answer(b'{"id": "c", "object": "text_completion", "choices": []}')

        super().__init__(Answer)


@contextlib.contextmanager
def process(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this project; terminated at the end, and expected to end cleanly."""
    running = subprocess.Popen([sys.executable, "-m", *arguments], env=os.environ | environ)
    try:
        yield running
    finally:
        running.terminate()
        assert running.wait(DEADLINE_S) == 0


def until(holds: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def config(tmp_path: Path, collector: str | None, replica: dict[str, str]) -> tuple[Path, str]:
    port, admin_port = free_ports(2)
    path = tmp_path / "gateway.yaml"
    settings = {
        "listen": {"port": port, "admin_port": admin_port},
        "replicas": [{"id": "replica-0", **replica}],
        "telemetry": {"otlp_endpoint": collector, "log_level": "warning"},
    }
    path.write_text(json.dumps(settings))
    return path, f"http://127.0.0.1:{port}"


def test_the_agents_spans_are_children_of_the_gateways(cluster: Cluster, tmp_path: Path) -> None:
    """Another agent of the shared deployment's first engine, and another gateway that follows it."""
    ports = cluster.options.ports
    (agent_port,) = free_ports(1)
    flags = {
        "--engine": cluster.engine_url(0),
        "--port": str(agent_port),
        "--kv-events": f"tcp://127.0.0.1:{ports.events[0]}",
        "--kv-replay": f"tcp://127.0.0.1:{ports.replays[0]}",
        "--log-level": "warning",
    }
    with Collector() as collector:
        agent = {"agent": f"http://127.0.0.1:{agent_port}", "engine": cluster.engine_url(0)}
        path, _ = config(tmp_path, collector.url, agent)
        arguments = [word for pair in flags.items() for word in pair]
        with process(
            "replica_agent", *arguments, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_BSP_SCHEDULE_DELAY="100"
        ):
            with process("gateway", "serve", "--config", str(path), OTEL_BSP_SCHEDULE_DELAY="100"):
                until(lambda: collector.of("replica-agent", "GET /v1/model-files"), "the agent's span")
                until(lambda: collector.of("prefix-gateway", "gateway.connect_agent"), "the gateway's span")
            # A report stream's span lasts as long as the stream: the gateway has gone, so it is over.
            until(lambda: collector.of("replica-agent", "GET /v1/reports"), "the stream's span")
        connects = {span.span_id: span for span in collector.of("prefix-gateway", "gateway.connect_agent")}
        served = [span for service, span in collector.spans if service == "replica-agent" and span.kind == 2]
        assert {"GET /v1/hello", "GET /v1/model-files", "GET /v1/reports"} <= {span.name for span in served}
        for span in served:
            assert span.parent_span_id in connects, span.name
            assert span.trace_id == connects[span.parent_span_id].trace_id
        (stream,) = collector.of("replica-agent", "GET /v1/reports")
        assert {each.key: each.value.string_value for each in connects[stream.parent_span_id].attributes} == {
            "replica": "replica-0"
        }


def test_a_clients_trace_is_continued_to_the_engine(tmp_path: Path) -> None:
    with Collector() as collector, EchoEngine() as engine:
        path, url = config(tmp_path, collector.url, {"engine": engine.url})
        with process("gateway", "serve", "--config", str(path), OTEL_BSP_SCHEDULE_DELAY="100"):
            until(lambda: ready(url), "gateway ready")
            body = {"model": "m", "prompt": "hello"}
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=sent, trust_env=False)
            assert answer.status_code == 200
            (request,) = until(lambda: collector.of("prefix-gateway", "gateway.request"), "the request's span")
        steps = {span.name: span for _, span in collector.spans if span.parent_span_id == request.span_id}
        assert set(steps) == {"identify", "place", "forward"}
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        assert {span.trace_id.hex() for span in steps.values()} == {TRACE}
        said = {each.key: each.value.string_value for each in request.attributes}
        assert (said["request_id"], said["replica"], said["http.route"]) == ("mine", "replica-0", "/v1/completions")
        (seen,) = engine.headers
        assert seen["traceparent"] == f"00-{TRACE}-{steps['forward'].span_id.hex()}-01"
        assert seen["tracestate"] == "vendor=1"


@pytest.mark.parametrize("silent", [True, False], ids=["silent collector", "off"])
def test_requests_and_stops_do_not_wait_for_a_collector(tmp_path: Path, silent: bool) -> None:
    """A collector that never answers holds up nothing; without one the client's own context reaches the engine."""
    with EchoEngine() as engine, socket.create_server(("127.0.0.1", 0)) as listener:
        collector = f"http://127.0.0.1:{listener.getsockname()[1]}" if silent else None
        path, url = config(tmp_path, collector, {"engine": engine.url})
        patient = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "OTEL_BSP_EXPORT_TIMEOUT": "600000"}
        with process("gateway", "serve", "--config", str(path), **patient) as gateway:
            until(lambda: ready(url), "gateway ready")
            sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            for _ in range(5):
                body = {"model": "m", "prompt": "hello"}
                answer = httpx.post(f"{url}/v1/completions", json=body, headers=sent, trust_env=False)
                assert answer.status_code == 200
            gateway.terminate()
            assert gateway.wait(DEADLINE_S / 3) == 0, "the exporter alone would wait for minutes"
        assert {seen["traceparent"] == sent["traceparent"] for seen in engine.headers} == {not silent}

"""Which headers pass, in both directions, and what the receipt says."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider

from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.path import headers
from gateway.path.exchange import Exchange
from gateway.path.usage import PromptTokensDetails, Usage
from gateway.placement.placement import Placement, Reason


async def _nothing(*_: Any) -> Any:
    raise AssertionError("headers send nothing")


def exchange(*, stream: bool = False) -> Exchange:
    made = Exchange({"path": "/v1/completions"}, _nothing, _nothing, "id-1")
    made.stream = stream
    return made


def placed(made: Exchange) -> Exchange:
    made.identity = PromptIdentity(mode=IdentityMode.EXACT, keys=array("Q"), tokens=40)
    made.placement = Placement(
        replica="replica-3",
        reason=Reason.SPILL,
        home="replica-1",
        ring=["replica-1", "replica-3"],
        predicted_cached_tokens=32,
        predicted_ttft_s=0.1,
        candidates=[],
    )
    return made


def test_hop_by_hop_headers_stop_here_both_ways() -> None:
    sent = [(name, b"x") for name in sorted(headers.HOP_BY_HOP)] + [
        (b"connection", b"close, X-Secret ,x-other"),
        (b"x-secret", b"1"),
        (b"x-other", b"1"),
        (b"x-kept", b"1"),
    ]
    to_engine = dict(headers.to_engine(sent, "id"))
    assert set(to_engine) == {b"x-kept", b"accept-encoding", b"x-request-id"}
    upper = [(name.title(), value) for name, value in sent]
    to_client = dict(headers.to_client(upper, exchange(), keep_length=True))
    assert set(to_client) == {b"x-kept", b"x-request-id"}


def test_what_the_gateway_owns_is_replaced() -> None:
    sent = [
        (b"host", b"public.example"),
        (b"content-length", b"5"),
        (b"accept-encoding", b"br"),
        (b"expect", b"100-continue"),
        (b"x-request-id", b"theirs"),
        (b"x-gateway-pin", b"replica-1"),
        (b"x-gateway-anything", b"1"),
        (b"authorization", b"Bearer key"),
        (b"content-type", b"application/json"),
    ]
    assert headers.to_engine(sent, "ours") == [
        (b"authorization", b"Bearer key"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"ours"),
    ]


def test_repeated_headers_keep_order_and_number() -> None:
    sent = [(b"accept", b"a"), (b"x-a", b"1"), (b"accept", b"b"), (b"x-a", b"2")]
    assert headers.to_engine(sent, "id")[:4] == sent
    assert headers.to_client([(b"Set-Cookie", b"1"), (b"Set-Cookie", b"2")], exchange(), keep_length=True)[:2] == [
        (b"set-cookie", b"1"),
        (b"set-cookie", b"2"),
    ]


def test_an_engine_cannot_forge_a_receipt() -> None:
    answered = [
        (b"X-Gateway-Replica", b"liar"),
        (b"X-Request-Id", b"liar"),
        (b"Date", b"liar"),
        (b"Server", b"uvicorn"),
        (b"Content-Length", b"12"),
        (b"Content-Type", b"text/event-stream"),
    ]
    made = placed(exchange())
    names = [name for name, _ in headers.to_client(answered, made, keep_length=False)]
    assert names.count(b"x-gateway-replica") == names.count(b"x-request-id") == 1
    assert not {b"date", b"server", b"content-length"} & set(names)
    assert (b"content-length", b"12") in headers.to_client(answered, made, keep_length=True)


def test_receipts() -> None:
    bare = exchange()
    assert headers.receipt(bare) == [(b"x-request-id", b"id-1")]
    made = placed(exchange())
    known = [
        (b"x-request-id", b"id-1"),
        (b"x-gateway-identity", b"exact"),
        (b"x-gateway-replica", b"replica-3"),
        (b"x-gateway-reason", b"spill"),
        (b"x-gateway-predicted-cached-tokens", b"32"),
    ]
    assert headers.receipt(made) == known
    made.usage = Usage(prompt_tokens=40)
    assert headers.receipt(made) == known, "the engine gave no figure"
    made.usage = Usage(prompt_tokens=40, prompt_tokens_details=PromptTokensDetails(cached_tokens=16))
    assert headers.receipt(made) == [*known, (b"x-gateway-cached-tokens", b"16")]
    made.stream = True
    assert headers.receipt(made) == known, "a stream's headers are sent before its usage is known"


@pytest.mark.parametrize("given", [b"a", b"req-1:2/3", b"~" * 128])
def test_a_printable_request_id_is_kept(given: bytes) -> None:
    assert headers.request_id([(b"x", b"y"), (b"x-request-id", given)]) == given.decode()


@pytest.mark.parametrize("given", [b"", b"two words", b"a\r\nx-evil: 1", b"\xe9", b"~" * 129, b"a\x7f"])
def test_any_other_is_replaced(given: bytes) -> None:
    made = headers.request_id([(b"x-request-id", given)])
    assert made != headers.request_id([(b"x-request-id", given)]), "a new one every time"
    assert len(made) == 32 and made.isalnum()


def test_a_recorded_span_becomes_the_parent_of_the_engines() -> None:
    theirs = b"00-11111111111111111111111111111111-2222222222222222-01"
    sent = [(b"traceparent", theirs), (b"tracestate", b"a=1"), (b"baggage", b"k=v"), (b"x-kept", b"1")]
    assert headers.traced(sent) == sent, "without tracing the client's own context passes"
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    carrier = {"traceparent": theirs.decode(), "tracestate": "a=1"}
    with tracer.start_as_current_span("forward", context=propagate.extract(carrier)) as span:
        injected = headers.traced(sent)
    ours = b"00-11111111111111111111111111111111-%016x-01" % span.get_span_context().span_id
    assert dict(injected) == {b"traceparent": ours, b"tracestate": b"a=1", b"baggage": b"k=v", b"x-kept": b"1"}
    assert len(injected) == 4

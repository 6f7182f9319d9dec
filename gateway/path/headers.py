"""Headers that pass, headers that do not, and the receipt."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from opentelemetry import propagate, trace

from gateway.fleet.engine_access import EngineAccess
from gateway.path.exchange import Exchange

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
ENGINE_CONTROL = frozenset({b"x-data-parallel-rank", b"x-vllm-priority", b"x-smg-routing-key"})
"""Headers by which clients may not tell an engine what to do."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_NOT_FORWARDED = (
    HOP_BY_HOP | ENGINE_CONTROL | {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id"}
)
_NOT_RETURNED = HOP_BY_HOP | {b"x-request-id", b"date", b"server"}
_NOT_RETURNED_OF_STREAMS = _NOT_RETURNED | {b"content-length"}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's `x-request-id` if it is printable and short, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def to_engine(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """The client's headers as the engine gets them. The engine must answer uncompressed, so that usage can be read."""
    headers = list(headers)
    named = _connection_named(headers)
    kept = [
        (n, v) for n, v in headers if n not in _NOT_FORWARDED and n not in named and not n.startswith(b"x-gateway-")
    ]
    return [*kept, (b"accept-encoding", b"identity"), (b"x-request-id", request_id.encode())]


def with_access(headers: Headers, access: EngineAccess) -> Headers:
    """With what this engine is to be sent by every request; the client's credentials are not for an engine that has
    one of ours."""
    if access.keyed:
        headers = [(n, v) for n, v in headers if n not in _CREDENTIALS]
    return [*headers, *access.headers] if access.headers else headers


def traced(headers: Headers) -> Headers:
    """With the current span as the parent of the engine's; the client's own context passes where none is recorded."""
    if not trace.get_current_span().is_recording():
        return headers
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    context = {name.encode(): value.encode() for name, value in carrier.items()}
    return [(n, v) for n, v in headers if n not in context] + list(context.items())


def to_client(headers: Iterable[tuple[bytes, bytes]], exchange: Exchange, *, keep_length: bool) -> Headers:
    """The engine's headers as the client gets them, with the receipt; `date` is set anew by the gateway's server."""
    lowered = [(name.lower(), value) for name, value in headers]
    not_returned = _NOT_RETURNED if keep_length else _NOT_RETURNED_OF_STREAMS
    named = _connection_named(lowered)
    kept = [(n, v) for n, v in lowered if n not in not_returned and n not in named and not n.startswith(b"x-gateway-")]
    return kept + receipt(exchange)


def receipt(exchange: Exchange) -> Headers:
    """Which replica, why, how the prompt was identified, and how many of its tokens should be cached there."""
    headers: Headers = [(b"x-request-id", exchange.request_id.encode())]
    if exchange.identity is not None:
        headers.append((b"x-gateway-identity", exchange.identity.mode.encode()))
    if (placement := exchange.placement) is not None:
        headers += [
            (b"x-gateway-replica", placement.replica.encode()),
            (b"x-gateway-reason", placement.reason.encode()),
            (b"x-gateway-predicted-cached-tokens", b"%d" % placement.predicted_cached_tokens),
        ]
    if not exchange.stream and exchange.usage is not None and exchange.usage.cached_tokens is not None:
        headers.append((b"x-gateway-cached-tokens", b"%d" % exchange.usage.cached_tokens))
    return headers


def _connection_named(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that the sender's Connection header makes hop-by-hop."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b","))

"""Errors as OpenAI clients expect them."""

from __future__ import annotations

import math

import msgspec

from gateway.errors import RequestError

Headers = list[tuple[bytes, bytes]]


def error_body(message: str, type: str, code: str | None, param: str | None = None) -> bytes:
    """`{"error": {...}}` as the OpenAI SDKs parse it."""
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def error_response(error: RequestError) -> tuple[int, Headers, bytes]:
    """Status, headers and body. `retry-after` and `x-should-retry` are set on purpose: the SDKs retry 429 and 5xx on
    their own, and a 5xx of the gateway itself has used up its retries already."""
    body = error_body(error.message, error.type, error.code, error.param)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers += [(b"retry-after", b"%d" % math.ceil(error.retry_after)), (b"x-should-retry", b"true")]
    elif error.status >= 500:
        headers.append((b"x-should-retry", b"false"))
    return error.status, headers, body

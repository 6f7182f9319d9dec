"""`POST /v1/load`: a gateway announces what it has placed here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from kvstore.messages import GatewayLoad
from replica_agent.gateways import Gateways

MAX_BODY = 4096
"""A load has some 200 bytes."""

RETRY_AFTER_S = b"1"
_decode = msgspec.json.Decoder(GatewayLoad).decode


class LoadEndpoint:
    """Takes loads up; 204, or 400, 413 or 429 with what is wrong.

    A bare ASGI application: it is called for every request that is placed here, and request and response objects would
    be most of what it costs (`benchmarks/README.md`, load exchange). Owns nothing.
    """

    def __init__(self, gateways: Gateways, on_change: Callable[[], None]) -> None:
        self._gateways = gateways
        self._on_change = on_change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One announcement."""
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY:
                await _answer(send, 413, "body_too_large", f"a load has at most {MAX_BODY} bytes")
                return
            if not message.get("more_body"):
                break
        try:
            load = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            await _answer(send, 400, "invalid_load", _field_first(str(error)))
            return
        changed = self._gateways.announced(load)
        if changed is None:
            await _answer(send, 429, "too_many_gateways", f"no more than {len(self._gateways)} can be known")
            return
        if changed:
            self._on_change()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def _field_first(message: str) -> str:
    text, separator, where = message.rpartition(" - at `$")
    return f"{where.rstrip('`').lstrip('.')}: {text}" if separator else f"not a load: {message}"


async def _answer(send: Send, status: int, code: str, message: str) -> None:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 429:
        headers.append((b"retry-after", RETRY_AFTER_S))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

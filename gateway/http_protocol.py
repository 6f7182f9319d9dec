"""uvicorn's HTTP protocol with the bounds that it lacks on what comes before a body."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.errors import error_response
from gateway.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers, give or take what arrives at once."""

HEAD_TIMEOUT_S = 20.0
"""From a connection, or the first byte of its next request, to the end of the headers."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request head is too long or does not arrive, and words protocol errors as OpenAI does.

    Owns one timer, which runs while a head is awaited; between requests uvicorn's own keep-alive timer does.
    """

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(RequestError(431, "the request headers are too long", code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, msg, code="invalid_http"))

    def _await_head(self) -> None:
        if self._timer is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)

    def _head_arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._refuse(RequestError(408, "the request headers did not arrive in time", code="headers_timeout"))

    def _refuse(self, error: RequestError) -> None:
        self._head_arrived()
        status, headers, body = error_response(error)
        head = b"".join(b"%s: %s\r\n" % pair for pair in headers)
        reason = HTTPStatus(status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %s\r\n%sconnection: close\r\n\r\n%s" % (status, reason, head, body))
        self.transport.close()

"""HTTP to engines, that are killed at any time."""

from __future__ import annotations

import httpx


class HttpTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport, but what it raises is an `httpx.HTTPError`.

    On uvloop a connection that the server resets as soon as it is there, as one does whose process was just killed, is
    an AttributeError (of anyio, that asks the socket for its peer): 183 of 3,000 requests to a server that does so.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See the base class."""
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError(f"reset as soon as it was connected ({error})", request=request) from error

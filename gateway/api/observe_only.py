"""The public port of a gateway that only looks."""

from __future__ import annotations

from typing import NoReturn

from starlette.types import Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.errors import RequestError
from gateway.path import headers

WHY = "this gateway only observes its replicas (observe_only): send requests to the engines, as before"


def refuse() -> NoReturn:
    """Raises the error that every request for an engine gets; nobody is to try again."""
    raise RequestError(503, WHY, type="server_error", code="observe_only")


class Refusal:
    """An ASGI callable in the place of the request path: answers every request with that error, unread."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refuse()
        except RequestError as error:
            status, sent, body = error_response(error)
        sent.append((b"x-request-id", headers.request_id(scope["headers"]).encode()))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})

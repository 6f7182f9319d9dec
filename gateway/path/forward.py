"""Fourth step: send the request to the replica and its answer to the client, byte by byte as it comes."""

from __future__ import annotations

import httpx
import msgspec

from gateway.errors import RequestError, UpstreamError
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.path import headers
from gateway.path.body import STRIPPED, Body
from gateway.path.event_stream import EventRelay
from gateway.path.exchange import Exchange
from gateway.path.hint import hint_fields
from gateway.path.place import Place
from gateway.path.retry_budget import RetryBudget
from gateway.path.upstream import Upstream
from gateway.path.usage import read_reply

RETRIED_STATUS = frozenset({502, 503})
"""An engine that answers so has not begun on the request."""

MAX_BUFFERED_REPLY = 8 * 1024 * 1024
"""A longer JSON reply is passed on without reading its usage, and so is whatever is no JSON."""

_decode_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
_STATUS_OF = {"timeout": (504, "upstream_timeout"), "connect": (503, "upstream_unreachable")}


class Forward:
    """Answers the client from the placed replica, trying others as long as nothing has been answered."""

    def __init__(
        self,
        upstream: Upstream,
        fleet: Fleet,
        health: EngineHealth,
        place: Place,
        budget: RetryBudget,
        *,
        observe_usage: bool,
        agent_token: str = "",
    ) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._health = health
        self._place = place
        self._budget = budget
        self._observe_usage = observe_usage
        self._agent_token = agent_token

    async def forward(self, exchange: Exchange) -> None:
        """Raises RequestError 502-504 when no replica answered; once an answer has begun it is ended here."""
        assert exchange.body is not None
        remove, put = self._edits(exchange.body, exchange.stream)
        drop_usage = bool(put)
        sent_headers = headers.traced(headers.to_engine(exchange.scope["headers"], exchange.request_id))
        self._budget.request()
        while True:
            assert exchange.placement is not None
            replica = self._fleet.replicas[exchange.placement.replica]
            fields = put | hint_fields(exchange, self._fleet, self._agent_token)
            body = exchange.body.edited(remove, fields) if remove or fields else exchange.body.raw
            try:
                response = await self._upstream.send(
                    replica, "POST", exchange.target, headers.with_access(sent_headers, replica.access), body
                )
            except UpstreamError as error:
                if error.kind == "connect":
                    self._health.failed(replica, str(error))
                self._retry_or_raise(exchange, error)
                continue
            try:
                if response.status_code in RETRIED_STATUS and self._may_retry(exchange):
                    self._again(exchange)
                    continue
                await self._relay(exchange, replica, response, drop_usage)
            except UpstreamError as error:
                if exchange.started:
                    raise
                self._retry_or_raise(exchange, error)
                continue
            finally:
                await response.aclose()
            return

    def _edits(self, body: Body, stream: bool) -> tuple[frozenset[str], dict[str, bytes]]:
        """Fields to cut out, and those to put in: only `stream_options`, where the gateway asks for a usage chunk that
        the client did not ask for."""
        remove = STRIPPED & {field.key for field in body.fields}
        put: dict[str, bytes] = {}
        if stream and self._observe_usage:
            try:
                options = _decode_options(body.get("stream_options") or b"null") or {}
            except msgspec.MsgspecError as error:
                raise _bad_options("stream_options must be an object") from error
            asked = bytes(options.get("include_usage", b"null"))
            if asked not in (b"true", b"false", b"null"):
                raise _bad_options("stream_options.include_usage must be a boolean")
            if asked != b"true":
                options["include_usage"] = msgspec.Raw(b"true")
                put["stream_options"] = msgspec.json.encode(options)
        return remove, put

    def _may_retry(self, exchange: Exchange) -> bool:
        untried = {replica.id for replica in self._fleet.taking(exchange.model)} - set(exchange.tried)
        return bool(untried) and self._budget.take()

    def _again(self, exchange: Exchange) -> None:
        self._place.unplace(exchange, answered=False)
        self._place.place(exchange)

    def _retry_or_raise(self, exchange: Exchange, error: UpstreamError) -> None:
        if self._may_retry(exchange):
            self._again(exchange)
            return
        status, code = _STATUS_OF.get(error.kind, (502, f"upstream_{error.kind}"))
        retry_after = 1.0 if status == 503 else None
        raise RequestError(status, str(error), type="server_error", code=code, retry_after=retry_after) from error

    async def _relay(self, exchange: Exchange, replica: Replica, response: httpx.Response, drop_usage: bool) -> None:
        kind = response.headers.get("content-type", "")
        outcome = "ok" if response.status_code < 400 else "engine_error"
        if kind.startswith("text/event-stream"):
            broken = await self._relay_events(exchange, replica, response, drop_usage)
            exchange.outcome = broken or outcome
        else:
            buffered = MAX_BUFFERED_REPLY if kind.startswith("application/json") else 0
            await self._relay_whole(exchange, replica, response, buffered)
            exchange.outcome = outcome

    async def _relay_whole(self, exchange: Exchange, replica: Replica, response: httpx.Response, buffered: int) -> None:
        """Hold back up to `buffered` bytes until the reply's end, so that the receipt can say what was cached."""
        reply = bytearray()
        async for chunk in self._upstream.chunks(replica, response):
            self._first_byte(exchange)
            reply += chunk
            if len(reply) > buffered or exchange.started:
                if not exchange.started:
                    await self._start(exchange, response, keep_length=True)
                await exchange.send({"type": "http.response.body", "body": bytes(reply), "more_body": True})
                reply.clear()
        if not exchange.started:
            if response.status_code < 400 and (parsed := read_reply(reply)) is not None:
                exchange.usage = parsed.usage
            await self._start(exchange, response, keep_length=True)
        await exchange.send({"type": "http.response.body", "body": bytes(reply)})

    async def _relay_events(
        self, exchange: Exchange, replica: Replica, response: httpx.Response, drop_usage: bool
    ) -> str:
        """Returns how the stream broke off after its beginning, which the client has been told; "" if it is whole."""
        relay = EventRelay(drop_usage=drop_usage)
        try:
            async for chunk in self._upstream.chunks(replica, response):
                if not exchange.started:
                    await self._start(exchange, response, keep_length=False)
                self._first_byte(exchange)
                if passed := relay.feed(chunk):
                    await exchange.send({"type": "http.response.body", "body": passed, "more_body": True})
        except UpstreamError as error:
            if not exchange.started:
                raise
            broken = f"upstream_{error.kind}"
            await exchange.send({"type": "http.response.body", "body": relay.broken(str(error), broken)})
            return broken
        finally:
            exchange.usage = relay.usage or exchange.usage
        if not exchange.started:
            await self._start(exchange, response, keep_length=False)
        await exchange.send({"type": "http.response.body", "body": relay.finish()})
        return ""

    async def _start(self, exchange: Exchange, response: httpx.Response, *, keep_length: bool) -> None:
        await exchange.send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": headers.to_client(response.headers.raw, exchange, keep_length=keep_length),
            }
        )

    def _first_byte(self, exchange: Exchange) -> None:
        """The prefill is over: note the time and take it off the replica's queue."""
        if exchange.first_byte_s is None:
            exchange.first_byte_s = exchange.elapsed()
            if exchange.ticket is not None:
                exchange.ticket.prefilled()


def _bad_options(message: str) -> RequestError:
    return RequestError(400, message, param="stream_options", code="invalid_type")

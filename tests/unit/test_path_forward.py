"""What an engine is told to fetch, in the body it gets; real sockets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from behaviours.http_support import Call, FaultEngine
from path_support import Parts, exchange, identity

from gateway.path.body import Body
from gateway.path.exchange import Exchange
from gateway.path.forward import Forward
from gateway.path.retry_budget import RetryBudget
from gateway.path.upstream import Upstream
from kvstore.errors import HintRefused
from kvstore.hint import Hint
from kvstore.messages import Tier

PROMPT = identity(range(640))
TOKEN = "deployment"
BODY = b'{"model": "m", "messages": [], "temperature":0.10, "kv_transfer_params": {"prefix_gateway": {"url": "evil"}}}'


class Deployment:
    """Three engines and a gateway's way to them; `tell` sends one request there."""

    def __init__(self, engines: list[FaultEngine]) -> None:
        self.engines = engines
        self.parts = Parts(allow_pinning=True, engines=[engine.url for engine in engines])

    async def tell(self, body: bytes = BODY, **headers: str) -> Exchange:
        parts = self.parts
        upstream = Upstream(connect_timeout_s=5, first_byte_timeout_s=20)  # these engines keep no connection alive
        forward = Forward(
            upstream,
            parts.fleet,
            parts.health,
            parts.place,
            RetryBudget(1.0),
            observe_usage=True,
            agent_token=TOKEN,
        )
        made = exchange(PROMPT, headers={name.replace("_", "-"): value for name, value in headers.items()})
        made.body, made.target = Body(body), "/v1/chat/completions"
        made.stream = made.body.flag("stream")
        parts.place.place(made)
        try:
            await forward.forward(made)
        finally:
            parts.account.close(made)
            await upstream.close()
        return made

    def got(self, replica: str) -> dict[str, Any]:
        """The last body that this replica's engine got."""
        body: dict[str, Any] = json.loads(self.engines[int(replica[-1])].calls[-1].body)
        return body


@contextlib.asynccontextmanager
async def deployed() -> AsyncIterator[Deployment]:
    async def ok(call: Call) -> None:
        await call.chat()

    async with FaultEngine(ok) as a, FaultEngine(ok) as b, FaultEngine(ok) as c:
        made = Deployment([a, b, c])
        try:
            yield made
        finally:
            await made.parts.client.aclose()


def hint_in(body: dict[str, Any]) -> Hint:
    assert list(body["kv_transfer_params"]) == ["prefix_gateway"]
    return msgspec.convert(body["kv_transfer_params"]["prefix_gateway"], Hint)


async def test_the_hint_is_signed_and_replaces_what_the_client_wrote() -> None:
    async with deployed() as made:
        for at in range(3):
            made.parts.pool(f"replica-{at}")
        made.parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)
        await made.tell(x_gateway_pin="replica-2")
        hint = hint_in(made.got("replica-2"))
        assert (hint.request, hint.source, hint.url) == ("id-1", "replica-0", "http://127.0.0.1:9000")
        assert (hint.blocks, hint.deadline_ms) == (39, 312), "624 tokens at 2,000 a second"
        hint.check(TOKEN)
        with pytest.raises(HintRefused):
            hint.check("another")
        assert b'"temperature":0.10' in made.engines[2].calls[-1].body, "the client's own bytes stay as they were"


async def test_no_hint_where_nothing_is_fetched() -> None:
    async with deployed() as made:
        made.parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)
        await made.tell(x_gateway_pin="replica-2")
        assert "kv_transfer_params" not in made.got("replica-2"), "no pools"
        for at in range(3):
            made.parts.pool(f"replica-{at}")
        await made.tell()
        assert "kv_transfer_params" not in made.got("replica-0"), "a hit"
        await made.tell(x_gateway_pin="replica-2", x_gateway_fetch="off")
        assert "kv_transfer_params" not in made.got("replica-2"), "the client forbade it"
        await made.tell(x_gateway_pin="replica-2")
        assert "kv_transfer_params" in made.got("replica-2")


async def test_a_stream_gets_hint_and_usage_option_together() -> None:
    async with deployed() as made:
        for at in range(3):
            made.parts.pool(f"replica-{at}")
        made.parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)
        await made.tell(b'{"model": "m", "messages": [], "stream": true}', x_gateway_pin="replica-1")
        body = made.got("replica-1")
        assert body["stream_options"] == {"include_usage": True}
        assert hint_in(body).source == "replica-0"


async def test_a_retry_has_a_hint_of_its_own_and_never_the_last_ones() -> None:
    async with deployed() as made:
        for at in range(3):
            made.parts.pool(f"replica-{at}")
        made.parts.hold("replica-0", PROMPT.keys, Tier.HBM, Tier.DRAM)

        async def busy(call: Call) -> None:
            await call.reply(503, {"error": {"message": "busy", "type": "server_error", "code": None}})

        made.engines[2].handler = busy
        done = await made.tell(x_gateway_pin="replica-2")
        assert done.tried == ["replica-2", "replica-0"]
        assert hint_in(made.got("replica-2")).source == "replica-0"
        assert "kv_transfer_params" not in made.got("replica-0"), "on the holder there is nothing to fetch"
        # The holder fails: whoever is next does not read from it, but may from another.
        made.engines[0].handler = busy
        done = await made.tell()
        assert done.tried[0] == "replica-0"
        assert all("kv_transfer_params" not in made.got(replica) for replica in done.tried)
        made.parts.hold("replica-1", PROMPT.keys[:20], Tier.DRAM)
        made.parts.fleet.replicas["replica-1"].load.admit(20_000)
        made.engines[2].handler = made.engines[1].handler
        done = await made.tell()
        assert done.tried == ["replica-0", "replica-2"]
        hint = hint_in(made.got("replica-2"))
        assert (hint.source, hint.blocks) == ("replica-1", 20)

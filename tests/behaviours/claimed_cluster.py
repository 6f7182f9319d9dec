"""Engines that say one thing and hold another: real agents and a gateway before stand-ins whose cache a test controls.

The engines take prompts of token ids, so that no tokenizer is needed for exact keys.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from agent_support import MODEL, SEED, EngineStandIn, Publisher, agent_running, removed, serving, settings_for, stored
from http_support import Running, eventually, serving_gateway
from loopback_ports import free_port
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.settings import PlacementSection, ReplicaSettings, Settings
from kvstore.identity import Namespace, token_keys

BLOCK = 16
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 16,
    "torch_dtype": "float16",
}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 2 * BLOCK
"""Layers, K and V, heads, dimensions, bytes of a number, tokens."""


def prompt(document: int, blocks: int = 20) -> list[int]:
    """A prompt of whole blocks and one token more, unlike every other document's from its first token on."""
    return [document * 10_000 + at for at in range(blocks * BLOCK + 1)]


class ClaimingEngine(EngineStandIn):
    """Answers completions, caches their blocks and publishes what it stores; a test makes it lie.

    `held` is its cache. What it says it had is what `held` has of a prompt, so `held.clear()` is a silent clear. With
    `restores` it publishes every block of every prompt, whether it had it or not, the first one in a batch of its own,
    so that nobody can tell it from one that was computed twice; and `evict` removes each once.
    `before_turn` is awaited between a request's arrival and its turn.
    """

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__()
        self.block = block
        self.url = ""
        self.held: set[int] = set()
        self.restores = False
        self.before_turn: Callable[[], Awaitable[None]] | None = None
        self.publisher: Publisher | None = None
        self.app.routes.append(Route("/v1/completions", self._complete, methods=["POST"]))

    def hashes(self, tokens: Sequence[int]) -> list[int]:
        """The engine's own names of a prompt's whole blocks."""
        units = self.block // BLOCK
        return [key >> 1 for key in token_keys(Namespace("engine").root(1), tokens)[units - 1 :: units]]

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that it has cached: whole blocks from the first on, and never the last token."""
        hashes = self.hashes(tokens)
        blocks = next((at for at, each in enumerate(hashes) if each not in self.held), len(hashes))
        return min(blocks, (len(tokens) - 1) // self.block) * self.block

    def publish(self, tokens: Sequence[int], first: int = 0, **more: Any) -> None:
        """Publishes that it stored a prompt's blocks from the `first` on."""
        assert self.publisher is not None
        hashes = self.hashes(tokens)
        if first < len(hashes):
            parent = hashes[first - 1] if first else None
            told = list(tokens[first * self.block : len(hashes) * self.block])
            self.publisher.publish(stored(hashes[first:], told, parent=parent, size=self.block, **more))  # type: ignore[arg-type]

    def evict(self, tokens: Sequence[int]) -> None:
        """Drops the blocks of a prompt, and says so."""
        assert self.publisher is not None
        gone = [each for each in self.hashes(tokens) if each in self.held]
        self.held -= set(gone)
        self.publisher.publish(removed(*reversed(gone)))

    async def _metrics(self, request: Request) -> Response:
        page = await super()._metrics(request)
        told = bytes(page.body).replace(b'block_size="16"', b'block_size="%d"' % self.block)
        return Response(told, page.status_code, media_type="text/plain")

    async def _complete(self, request: Request) -> Response:
        assert self.publisher is not None
        asked = (await request.json())["prompt"]
        tokens: list[int] = asked if isinstance(asked, list) else list(asked.encode())
        if self.before_turn is not None:
            await self.before_turn()
        cached = self.match(tokens)
        self.held |= set(self.hashes(tokens))
        if self.restores:
            self.publish(tokens[: self.block])
            self.publish(tokens, 1)
        else:
            self.publish(tokens, cached // self.block)
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return JSONResponse({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})


class Claimed:
    """Engines, their agents and one gateway; `ask` and `credited` are the client's and the operator's view."""

    def __init__(
        self, engines: list[ClaimingEngine], settings: Settings, running: Running, http: httpx.AsyncClient
    ) -> None:
        self.engines = engines
        self.settings = settings
        self.gateway = running.gateway
        self.running = running
        self.http = http
        self.passed_s = 0.0
        clock = self.gateway.fleet.trust._clock
        self.gateway.fleet.trust._clock = lambda: clock() + self.passed_s

    async def ask(self, tokens: list[int] | str, *, pin: int | None = None, **more: Any) -> dict[str, Any]:
        """One answer; gives its receipt."""
        headers = {} if pin is None else {"x-gateway-pin": f"replica-{pin}"}
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1} | more
        answer = await self.http.post(f"{self.running.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found = await self.http.get(f"{self.running.admin_url}/admin/receipts/{answer.headers['x-request-id']}")
        receipt: dict[str, Any] = found.json()
        return receipt

    async def explain(self, tokens: list[int]) -> list[dict[str, Any]]:
        """Every replica's terms for a prompt, in order."""
        body = {"model": MODEL, "prompt": tokens}
        answer = await self.http.post(f"{self.running.admin_url}/admin/explain", json=body)
        return sorted(answer.json()["placement"]["candidates"], key=lambda each: str(each["replica"]))

    async def credited(self, tokens: list[int]) -> list[int]:
        """Tokens of a prompt that each replica is believed to hold."""
        return [each["cached_tokens"] for each in await self.explain(tokens)]

    async def trust(self, at: int) -> dict[str, Any]:
        """What `/admin/replicas` says of a replica's trust."""
        found = (await self.http.get(f"{self.running.admin_url}/admin/replicas")).json()["replicas"]
        trust: dict[str, Any] = found[at]["trust"]
        return trust

    async def metrics(self) -> list[str]:
        """The lines of `/metrics`."""
        return (await self.http.get(f"{self.running.admin_url}/metrics")).text.splitlines()

    async def judged(self, at: int, requests: int) -> None:
        """Until so many requests of a replica have been judged; the time that takes passes now."""
        self.passed_s += 1.0
        trust, name = self.gateway.fleet.trust, f"replica-{at}"
        await eventually(lambda: trust.state(name).judged == requests, f"{trust.state(name).judged}, not {requests}")

    async def taken_anew(self, at: int, times: int) -> None:
        """Until a replica's reports were disbelieved so many times, and each time taken anew."""
        stream = self.gateway.fleet.streams[f"replica-{at}"]
        await eventually(
            lambda: stream.losses.get("disbelieved", 0) == times and stream.snapshots > times,
            f"{stream.losses}, {stream.snapshots} snapshots",
        )

    async def reported(self, at: int, blocks: int) -> None:
        """Until the gateway knows of so many blocks of a replica."""
        index, name = self.gateway.fleet._index, f"replica-{at}"
        await eventually(lambda: index.held_blocks(name) == blocks, f"{index.held_blocks(name)} blocks, not {blocks}")


@contextlib.asynccontextmanager
async def claimed_cluster(
    count: int = 1, *, blocks: Sequence[int] = (), bare: str = "", bare_agent: str | None = None, **settings: Any
) -> AsyncIterator[Claimed]:
    """A deployment in this process, ready: every engine is up and every agent's reports are followed.

    `blocks` are the block sizes of the engines, if they differ. With `bare` there is one engine more, without an agent
    of ours, which serves a model of that name; `bare_agent` is the URL of what is to be taken for one.
    """
    async with contextlib.AsyncExitStack() as stack:
        engines, replicas = [], []
        shape = stack.enter_context(tempfile.TemporaryDirectory())
        (Path(shape) / "config.json").write_text(json.dumps(SHAPE))
        for at, block in enumerate(blocks or [BLOCK] * count):
            engine = ClaimingEngine(block)
            events, replay = free_port(), free_port()
            engine.publisher = Publisher(events, replay)
            stack.callback(engine.publisher.close)
            engine.root = shape
            engine.url = url = await stack.enter_async_context(serving(engine.app))
            flags = settings_for(url, events, replay, **{"replica-id": f"replica-{at}"})
            replica, agent = await stack.enter_async_context(agent_running(flags))
            engines.append(engine)
            replicas.append(ReplicaSettings(id=f"replica-{at}", engine=url, agent=agent))
            await eventually(
                lambda replica=replica: replica.subscriber.connected and not replica.subscriber.syncing,  # type: ignore[misc]
                "the agent is not connected to its engine's events",
            )
        if bare:
            engine = ClaimingEngine()
            engine.models = [{"id": bare, "root": None, "parent": None}]
            engine.publisher = Publisher(free_port(), None)
            stack.callback(engine.publisher.close)
            engines.append(engine)
            url = await stack.enter_async_context(serving(engine.app))
            replicas.append(ReplicaSettings(id="bare", engine=url, agent=bare_agent))
        placement = PlacementSection(route_seed=SEED, allow_pinning=True)
        made = Settings(replicas=replicas, placement=placement, **settings)
        running = await stack.enter_async_context(serving_gateway(made))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        fleet = running.gateway.fleet.replicas.values()
        await eventually(lambda: all(each.reporting for each in fleet if each.agent), "reports are not followed")
        if not settings.get("observe_only"):
            await eventually(lambda: all(each.engine_up for each in fleet), "an engine is not up")
        yield Claimed(engines, made, running, http)

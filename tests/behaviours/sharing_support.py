"""Engines that hold what they are asked, with real agents beside them and gateways in front, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec
from agent_support import MODEL, SEED, EngineStandIn, agent_running, serving, settings_for
from http_support import Running, eventually, serving_gateway
from loopback_ports import free_port
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.settings import ListenSettings, PlacementSection, ReplicaSettings, Settings
from replica_agent.replica import Replica

TOKEN = "t"


class HoldingEngine(EngineStandIn):
    """Answers requests when it is let go. `held` is how many it has, whoever sent them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self._let_go = asyncio.Event()
        self.app.routes.append(Route("/v1/completions", self._complete, methods=["POST"]))

    @property
    def held(self) -> int:
        return self.running

    def let_go(self) -> None:
        """Answers all it holds."""
        self._let_go.set()
        self._let_go = asyncio.Event()

    async def _complete(self, request: Request) -> Response:
        self.running += 1
        try:
            await request.body()
            await self._let_go.wait()
        finally:
            self.running -= 1
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        return JSONResponse(
            {"id": "c", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}
        )


class Shared:
    """Gateways over the same replicas. Owns the requests that it has sent; `let_go` ends them all."""

    def __init__(
        self, engines: Sequence[HoldingEngine], agents: Sequence[Replica], gateways: Sequence[Running]
    ) -> None:
        self.engines = engines
        self.agents = agents
        self.gateways = gateways
        self.http = httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=None))
        self._sent: list[asyncio.Task[httpx.Response]] = []

    def send(self, gateway: int, prompt: str) -> None:
        """A request that stays until it is let go."""
        self.send_to(self.gateways[gateway].url, prompt)

    def send_to(self, url: str, prompt: str) -> None:
        """The same, to an engine or a gateway."""
        body = {"model": MODEL, "prompt": prompt}
        self._sent.append(asyncio.create_task(self.http.post(f"{url}/v1/completions", json=body)))

    async def let_go(self) -> None:
        """Ends all requests, each of which must have been answered."""
        waiting = set(self._sent)
        while waiting:  # some may not have reached an engine yet
            for engine in self.engines:
                engine.let_go()
            _, waiting = await asyncio.wait(waiting, timeout=0.02)
        for each in self._sent:
            assert each.result().status_code == 200, each.result().text
        self._sent.clear()

    def own(self, gateway: int) -> list[int]:
        """Sequences that a gateway has placed on each replica."""
        return [replica.load.sequences for replica in self.gateways[gateway].gateway.fleet.replicas.values()]

    def others(self, gateway: int) -> list[int]:
        """Sequences that it believes others to have placed."""
        return [
            replica.others.announced.sequences for replica in self.gateways[gateway].gateway.fleet.replicas.values()
        ]

    def placed(self) -> list[int]:
        """Sequences on each replica, by all gateways."""
        return [sum(each) for each in zip(*(self.own(at) for at in range(len(self.gateways))), strict=True)]

    async def settled(self) -> None:
        """Until every gateway knows of all that the others have placed, and all of it has reached the engines."""
        everyone = range(len(self.gateways))

        def agree() -> bool:
            placed = self.placed()
            known = all(
                [own + others for own, others in zip(self.own(at), self.others(at), strict=True)] == placed
                for at in everyone
            )
            return known and [engine.held for engine in self.engines] == placed

        await eventually(agree, "the gateways do not agree on what is placed")


@contextlib.asynccontextmanager
async def sharing(replicas: int, gateways: int) -> AsyncIterator[Shared]:
    """So many replicas with an agent each, and so many gateways in front of all of them, each of which hears of the
    others."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [HoldingEngine() for _ in range(replicas)]
        agents, listed = [], []
        for at, engine in enumerate(engines):
            url = await stack.enter_async_context(serving(engine.app))
            flags = settings_for(url, free_port(), None, **{"replica-id": f"replica-{at}"})
            settings = msgspec.structs.replace(flags, token=TOKEN)
            agent, agent_url = await stack.enter_async_context(agent_running(settings))
            agents.append(agent)
            listed.append(ReplicaSettings(id=f"replica-{at}", engine=url, agent=agent_url))
        running = [
            await stack.enter_async_context(serving_gateway(settings_of(f"gateway-{number}", listed)))
            for number in range(gateways)
        ]
        shared = Shared(engines, agents, running)
        stack.push_async_callback(shared.http.aclose)
        await eventually(
            lambda: all(
                replica.engine_up and replica.reporting and len(replica.others.gateways) == gateways - 1
                for each in running
                for replica in each.gateway.fleet.replicas.values()
            ),
            "the gateways do not hear of each other",
        )
        yield shared


def settings_of(name: str, replicas: Sequence[ReplicaSettings]) -> Settings:
    """One gateway of a deployment."""
    return Settings(
        listen=ListenSettings(name=name),
        replicas=list(replicas),
        placement=PlacementSection(route_seed=SEED),
        agent_token=TOKEN,
    )

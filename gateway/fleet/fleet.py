"""The replicas behind this gateway, and what is known of each."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import httpx

from gateway.duplication.ledger import Ledger
from gateway.fleet.agent_access import AgentAccess
from gateway.fleet.announcer import Announcer
from gateway.fleet.engine_access import engine_accesses
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.fetches import Fetches
from gateway.fleet.model_profiles import ModelProfiles
from gateway.fleet.others import GatewayId, Load
from gateway.fleet.replica import Replica
from gateway.fleet.report_stream import ReportStream
from gateway.fleet.slow_start import SlowStart
from gateway.fleet.speed import FleetSpeed
from gateway.identity.prompt import IdentityMode
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims, ReplicaView
from gateway.placement.trust import Trust
from gateway.settings import Settings
from kvstore.identity import UNIT_TOKENS
from kvstore.messages import Hello, Tier

INITIAL_PREFILL_TOKENS_PER_S = 2_000.0
"""Assumed until a prefill has been seen; mostly the ratio between replicas matters to placement, not the figure."""


class Fleet:
    """Owns the replicas and the tasks that watch them; `run` keeps all of it true until cancelled.

    Making one reads the engines' keys and certificates, and raises SettingsError for those that cannot be used. With
    `agents` those that are reached by https are told of this gateway's load.
    """

    def __init__(
        self,
        settings: Settings,
        index: PrefixIndex,
        ledger: Ledger,
        profiles: ModelProfiles,
        health: EngineHealth,
        client: httpx.AsyncClient,
        fetches: Fetches,
        trust: Trust | None = None,
        agents: AgentAccess | None = None,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._health = health
        self.trust = trust or Trust()
        self.failed_tokens = fetches.failed_tokens
        self.speed = FleetSpeed(INITIAL_PREFILL_TOKENS_PER_S)
        self.slow_start = SlowStart(settings.placement.slow_start_s)
        health.on_up = self._came_up
        accesses = engine_accesses(settings)
        self.me = GatewayId(settings.listen.name or _own_name(settings.listen.port), time.time_ns())
        self.replicas = {each.id: Replica(each, accesses[each.id], self.me) for each in settings.replicas}
        self.streams: dict[str, ReportStream] = {}
        self.announcers: dict[str, Announcer] = {}
        for replica in self.replicas.values():
            index.add_replica(replica.id)
            if replica.agent is not None:
                self.streams[replica.id] = ReportStream(
                    replica,
                    replica.agent,
                    index,
                    client,
                    token=settings.agent_token,
                    route_seed=settings.placement.route_seed,
                    on_hello=self._register,
                    on_model_files=None if settings.observe_only else profiles.learn,
                    on_fetch=fetches.add,
                    on_heartbeat=self.trust.heard,
                    on_reporting=self._reports,
                )
                self.announcers[replica.id] = Announcer(
                    replica, replica.agent, self.me, token=settings.agent_token, access=agents
                )

    async def run(self) -> None:
        """Watch engines and agents until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._health.watch(self.replicas.values()), name="engine health")
            for stream in self.streams.values():
                group.create_task(stream.follow(), name=f"reports {stream.replica_id}")
            for announcer in self.announcers.values():
                group.create_task(announcer.run(), name=f"load {announcer.replica_id}")

    def models(self) -> dict[str, dict[str, Any]]:
        """The model cards of all engines that are up, by id."""
        cards: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            if replica.engine_up:
                cards |= {name: card for name, card in replica.models.items() if name not in cards}
        return cards

    def context(self, model: str) -> float:
        """The longest context any replica has for this model, in tokens; infinite where none says."""
        said = [each.models[model].get("max_model_len") for each in self.replicas.values() if model in each.models]
        lengths = [length for length in said if isinstance(length, int) and length > 0]
        return max(lengths) if lengths else math.inf

    def knows(self, model: str) -> bool:
        """Whether any replica, up or down, is known to serve this model."""
        return any(model in replica.models for replica in self.replicas.values())

    def serving(self, model: str) -> list[Replica]:
        """Replicas that serve this model now, and may be read from by others."""
        return [each for each in self.replicas.values() if each.engine_up and model in each.models]

    def taking(self, model: str) -> list[Replica]:
        """Those of them that may take a request."""
        return [each for each in self.serving(model) if not each.draining]

    def has_agents(self, model: str) -> bool:
        """Whether any replica of this model has an agent, connected or not."""
        return any(each.agent is not None and model in each.models for each in self.replicas.values())

    def views(self, model: str, mode: IdentityMode) -> list[ReplicaView]:
        """What the placer is told: how full each replica is, and whose word there is for what it holds."""
        serving = self.serving(model)
        return [
            replica.view(
                _claims(replica, mode),
                self._index.reported_blocks(replica.id, Tier.HBM),
                self.speed.of(replica.id),
                others,
                self.trust.credit(replica.id),
                self.speed.decode_share(replica.decoding),
                self.slow_start.warmth(replica.id),
            )
            for replica, others in zip(serving, _others(serving), strict=True)
        ]

    def cache_shape(self, model: str) -> tuple[int, int]:
        """Units of the smallest engine block of the replicas that serve a model, and the tokens that all of them
        together can hold, in HBM and in their pools: 0 where one of them does not say."""
        replicas = self.serving(model)
        units = max(1, min((each.block_size for each in replicas), default=1) // UNIT_TOKENS)
        if not all(each.capacity_blocks for each in replicas):
            return units, 0
        return units, sum(
            (each.capacity_blocks + (each.fetch.slots if each.fetch else 0)) * each.block_size for each in replicas
        )

    def resync(self, replica: str, why: str) -> None:
        """Has the reports of a replica taken anew, from a snapshot on; nothing to do where none are followed."""
        if stream := self.streams.get(replica):
            stream.resync(why)

    def sequences(self) -> int:
        """Requests at the engines, running and waiting: of all clients, where an agent says, else this gateway's."""
        return sum(
            beat.running + beat.waiting if (beat := each.heartbeat) and each.reporting else each.load.sequences
            for each in self.replicas.values()
        )

    def observes(self) -> bool:
        """Whether the reports of any replica are followed."""
        return any(replica.reporting for replica in self.replicas.values())

    def ready(self) -> bool:
        """Whether any engine is up, and its replica takes requests."""
        return any(replica.engine_up and not replica.draining for replica in self.replicas.values())

    def _came_up(self, replica: Replica) -> None:
        held = self._index.reported_blocks(replica.id, Tier.HBM)
        self.slow_start.came_up(replica.id, held, replica.capacity_blocks)

    def _reports(self, replica: Replica) -> None:
        held = self._index.reported_blocks(replica.id, Tier.HBM)
        self.slow_start.reported(replica.id, held, replica.capacity_blocks)

    def _register(self, replica: Replica, hello: Hello) -> None:
        model = hello.models[0] if hello.models else "unknown"
        self._ledger.register(replica.id, model=model, block_bytes=replica.block_bytes, block_tokens=hello.block_size)


def _own_name(port: int) -> str:
    """Tells gateways apart for whoever looks: a pod's name, or a machine's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100] + f":{port}"


def _others(replicas: Sequence[Replica]) -> list[Load]:
    """The load of each replica that is not this gateway's.

    Where nothing is heard of it (no agent, or it is away) the mean of the others stands in, by weight. Nothing at all
    would make that replica look like the emptiest, to every gateway at once.
    """
    loads = [replica.others.load for replica in replicas]
    known = [(replica.weight, load) for replica, load in zip(replicas, loads, strict=True) if load is not None]
    if len(known) == len(replicas):
        return [load for _, load in known]
    weights = sum(weight for weight, _ in known) or 1.0
    sequences = sum(load.sequences for _, load in known) / weights
    tokens = sum(load.prefill_tokens for _, load in known) / weights
    return [
        Load(round(sequences * replica.weight), round(tokens * replica.weight)) if load is None else load
        for replica, load in zip(replicas, loads, strict=True)
    ]


def _claims(replica: Replica, mode: IdentityMode) -> Claims:
    if mode is IdentityMode.HASH:
        return Claims.NONE
    if mode is IdentityMode.EXACT and replica.reporting:
        return Claims.REPORTS
    return Claims.LEARNED

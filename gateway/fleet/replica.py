"""One replica as the gateway knows it."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.fleet.decoding import Decoding
from gateway.fleet.engine_access import EngineAccess
from gateway.fleet.inflight import InFlight
from gateway.fleet.others import NOTHING, GatewayId, Load, Others
from gateway.placement.placement import Claims, ReplicaView
from gateway.settings import ReplicaSettings
from kvstore.identity import UNIT_TOKENS
from kvstore.messages import MAX_REPLICA_BLOCKS, FetchState, Heartbeat, Hello, Problem

NAMELESS = GatewayId("", 0)


class Replica:
    """What is known of one replica.

    `engine_up` and `models` are written by the health prober and by a failed connection, `hello`, `heartbeat` and
    `reporting` by its report stream, which tells `others` too, `load` by the request path, `draining` by the operator:
    it takes nothing new then. Everything runs on one event loop.
    """

    def __init__(self, settings: ReplicaSettings, access: EngineAccess | None = None, me: GatewayId = NAMELESS) -> None:
        self.id = settings.id
        self.weight = settings.weight
        self.engine = httpx.URL(settings.engine)
        self.access = access or EngineAccess(dp_rank=settings.dp_rank)
        self.dp_rank = settings.dp_rank
        self.agent = httpx.URL(settings.agent) if settings.agent else None
        self.engine_up = False
        self.engine_error = "not probed yet"
        self.models: dict[str, dict[str, Any]] = {}
        self.hello: Hello | None = None
        self.heartbeat: Heartbeat | None = None
        self.reporting = False
        self.agent_error = "" if self.agent is None else "not connected yet"
        self.draining = False
        self.load = InFlight()
        self.others = Others(me)

    @property
    def block_size(self) -> int:
        """Tokens in an engine block; one RouteKey unit until the agent has said."""
        return self.hello.block_size if self.hello else UNIT_TOKENS

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block, 0 while the geometry is unknown."""
        geometry = self.hello.geometry if self.hello else None
        return geometry.block_bytes(self.block_size) if geometry else 0

    @property
    def attention(self) -> float:
        """How much longer a token takes for each one before it, as a share of the first one's; 0 while unknown."""
        return self.hello.attention if self.hello else 0.0

    @property
    def decoding(self) -> Decoding | None:
        """What its engine computes now, by its agent's last word: mostly decodes, as prefills are few at a time. None
        without one."""
        beat = self.heartbeat
        if beat is None or not self.reporting:
            return None
        return Decoding(beat.running, beat.kv_usage * beat.capacity_blocks * self.block_size)

    @property
    def waiting(self) -> bool:
        """Whether its engine lets requests wait, by its agent's last word."""
        return self.heartbeat is not None and self.reporting and self.heartbeat.waiting > 0

    @property
    def capacity_blocks(self) -> int:
        """Blocks in the engine's pool, 0 while unknown; no more than may be reported."""
        told = self.heartbeat or self.hello
        return min(told.capacity_blocks, MAX_REPLICA_BLOCKS) if told is not None else 0

    @property
    def fetch(self) -> FetchState | None:
        """What its agent's pool can do; None without a pool, or while nobody vouches for one."""
        return self.heartbeat.fetch if self.heartbeat is not None and self.reporting else None

    @property
    def problems(self) -> list[Problem]:
        """What its agent finds wrong; nothing while there are no reports."""
        return self.heartbeat.problems if self.heartbeat is not None and self.reporting else []

    def view(
        self,
        claims: Claims,
        held_blocks: int,
        prefill_tokens_per_s: float,
        others: Load = NOTHING,
        trust: float = 1.0,
        decode_share: float = 0.0,
        warmth: float = 1.0,
    ) -> ReplicaView:
        """What the placer is told about this replica now; `others` is the load there that is not this gateway's.

        Nothing decodes where nothing is known to run, whatever the last heartbeat said: an idle replica that has just
        answered is as good as the others, and the ring decides.
        """
        running = self.load.sequences + others.sequences
        return ReplicaView(
            id=self.id,
            claims=claims,
            weight=0.0 if self.draining else self.weight,
            warmth=warmth,
            queued_prefill_tokens=self.load.prefill_tokens + others.prefill_tokens,
            running=running,
            prefill_tokens_per_s=prefill_tokens_per_s,
            attention=self.attention,
            decode_share=decode_share if running else 0.0,
            block_units=max(1, self.block_size // UNIT_TOKENS),
            capacity_blocks=self.capacity_blocks,
            held_blocks=held_blocks,
            block_bytes=self.block_bytes,
            fetch=self.fetch,
            trust=trust,
        )

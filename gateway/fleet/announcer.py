"""Announces to one replica's agent what this gateway has placed there, so that the other gateways know."""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec

from gateway.fleet.agent_access import AgentAccess
from gateway.fleet.agent_line import AgentLine, LineFailed
from gateway.fleet.others import GatewayId
from gateway.fleet.replica import Replica
from kvstore.messages import GatewayLoad

log = logging.getLogger(__name__)

COALESCE_S = 0.005
"""Changes within this time of an announcement share the next one."""

LESS_S = 0.1
"""A load that has only become smaller may wait so long for one that is larger: first tokens and ends of requests are
most changes, and what is placed next tells of them, too. Replayed on the Mooncake conversation trace, four gateways
that hear of them 0.25 s late have the mean TTFT of those that hear of them at once (0.670 against 0.673 s)."""

IDLE_S = 0.25
"""Without a change the load is announced this often; agents forget who is silent for a second."""

RETRY_S = 1.0
"""After an announcement that was not taken."""


class Announcer:
    """Posts the replica's `InFlight` at once when it grows, soon when it shrinks, and every `IDLE_S`.

    As long as the agent has heard of no other gateway, nobody would learn of a change before the next one arrives, and
    only the latter is done: a gateway that is alone spends next to nothing. Owns the connection and the counts; `run`
    is its only task.
    """

    def __init__(
        self, replica: Replica, agent: httpx.URL, me: GatewayId, *, token: str, access: AgentAccess | None = None
    ) -> None:
        self.replica_id = replica.id
        self._replica = replica
        self._me = me
        self._line = AgentLine(agent.join("/v1/load"), access=access, token=token)
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._told = self._load()
        self._encode = msgspec.json.Encoder().encode
        self.announcements = 0
        self.failures: dict[str, int] = {}
        self.error = ""
        replica.load.on_change = self.changed

    def changed(self) -> None:
        """The load is another one."""
        if self._replica.others.gateways and not self._due.is_set():
            load, told = self._replica.load, self._told
            if load.sequences > told.sequences or load.prefill_tokens > told.prefill_tokens:
                self._due.set()
            else:
                self._announce_by(asyncio.get_running_loop().time() + LESS_S)

    async def run(self) -> None:
        """Announces until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                sent, self._told = clock(), self._load()
                self._due.clear()
                self._drop_timer()
                try:
                    await self._line.post(self._encode(self._told))
                except LineFailed as failed:
                    self._failed(failed)
                    await asyncio.sleep(RETRY_S)
                    continue
                self.error = ""
                self.announcements += 1
                await asyncio.sleep(max(0.0, sent + COALESCE_S - clock()))
                self._announce_by(sent + IDLE_S)
                await self._due.wait()
        finally:
            self._drop_timer()
            self._line.close()

    def _announce_by(self, when: float) -> None:
        if self._timer is None or when < self._timer.when():
            self._drop_timer()
            self._timer = asyncio.get_running_loop().call_at(when, self._due.set)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _load(self) -> GatewayLoad:
        load = self._replica.load
        return GatewayLoad(
            gateway=self._me.name,
            epoch=self._me.epoch,
            prefill_tokens=load.prefill_tokens,
            sequences=load.sequences,
        )

    def _failed(self, failed: LineFailed) -> None:
        if self.error != str(failed):
            log.warning("%s does not hear of this gateway's load: %s", self.replica_id, failed)
        self.error = str(failed)
        self.failures[failed.kind] = self.failures.get(failed.kind, 0) + 1

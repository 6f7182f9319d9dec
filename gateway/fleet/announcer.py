"""Announces to one replica's agent what this gateway has placed there, so that the other gateways know."""

from __future__ import annotations

import asyncio
import logging

import httpx
import msgspec

from gateway.fleet.agent_line import AgentLine, LineFailed
from gateway.fleet.others import GatewayId
from gateway.fleet.replica import Replica
from kvstore.messages import GatewayLoad

log = logging.getLogger(__name__)

COALESCE_S = 0.005
"""Changes within this time of an announcement share the next one."""

IDLE_S = 0.25
"""Without a change the load is announced this often; agents forget who is silent for a second."""

RETRY_S = 1.0
"""After an announcement that was not taken."""


class Announcer:
    """Posts the replica's `InFlight` at once when it changes, and every `IDLE_S`.

    As long as the agent has heard of no other gateway, nobody would learn of a change before the next one arrives, and
    only the latter is done: a gateway that is alone spends next to nothing. Owns the connection and the counts; `run`
    is its only task.
    """

    def __init__(self, replica: Replica, agent: httpx.URL, me: GatewayId, *, token: str) -> None:
        self.replica_id = replica.id
        self._replica = replica
        self._me = me
        self._line = AgentLine(agent.join("/v1/load"), token=token)
        self._due = asyncio.Event()
        self._encode = msgspec.json.Encoder().encode
        self.announcements = 0
        self.failures: dict[str, int] = {}
        self.error = ""
        replica.load.on_change = self.changed

    def changed(self) -> None:
        """The load is another one."""
        if self._replica.others.gateways:
            self._due.set()

    async def run(self) -> None:
        """Announces until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                sent = clock()
                self._due.clear()
                try:
                    await self._line.post(self._encode(self._load()))
                except LineFailed as failed:
                    self._failed(failed)
                    await asyncio.sleep(RETRY_S)
                    continue
                self.error = ""
                self.announcements += 1
                await asyncio.sleep(max(0.0, sent + COALESCE_S - clock()))
                if not self._due.is_set():
                    timer = asyncio.get_running_loop().call_at(sent + IDLE_S, self._due.set)
                    await self._due.wait()
                    timer.cancel()
        finally:
            self._line.close()

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

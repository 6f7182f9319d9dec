"""Finds out which engines answer, and what they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import msgspec

from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.replica import Replica

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0

ASKS_FOR_KEY = (
    "401: the engine asks for an API key: give it as PREFIX_GATEWAY_ENGINE_API_KEY or the replica's api_key_file"
)
REFUSES_KEY = "401: the engine refuses the API key of PREFIX_GATEWAY_ENGINE_API_KEY or the replica's api_key_file"


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class EngineHealth:
    """Probes every engine's `/v1/models`: an engine is up when it names a model.

    Owns `Replica.engine_up`, `engine_error` and `models`, together with `failed`, which the request path calls when a
    connection is refused, so that a dead engine is left at once and taken back by the next good probe.
    """

    def __init__(self, engines: EngineHttp, on_down: Callable[[str], None]) -> None:
        """`on_down` is told the id of a replica whose engine stopped answering: its cache may be gone. `on_up`
        is told of a replica whose engine answers, for the first time or again."""
        self._engines = engines
        self._on_down = on_down
        self.on_up: Callable[[Replica], None] = _tell_nobody

    async def watch(self, replicas: Iterable[Replica]) -> None:
        """Probe all replicas until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(self._watch(replica), name=f"health {replica.id}")

    async def _watch(self, replica: Replica) -> None:
        while True:
            try:
                await self.probe(replica)
            except Exception as error:  # a watch that has died silently is worse than any one probe
                log.exception("probing the engine of %s failed", replica.id)
                self.failed(replica, f"internal error: {error}")
            await asyncio.sleep(PROBE_EVERY_S if replica.engine_up else PROBE_EVERY_S / 4)

    async def probe(self, replica: Replica) -> None:
        """Ask once."""
        try:
            response = await self._engines.get(replica, "/v1/models", timeout_s=PROBE_TIMEOUT_S)
            if response.status_code == 401:
                self.failed(replica, REFUSES_KEY if replica.access.keyed else ASKS_FOR_KEY)
                return
            response.raise_for_status()
            cards = msgspec.json.decode(response.content, type=_ModelList).data
        except (httpx.HTTPError, msgspec.MsgspecError, RecursionError) as error:
            self.failed(replica, f"{type(error).__name__}: {error}")
            return
        models = {str(card["id"]): card for card in cards if "id" in card}
        if not models:
            self.failed(replica, "/v1/models names no model")
            return
        replica.models = models
        if not replica.engine_up:
            log.info("engine of %s is up: %s", replica.id, ", ".join(replica.models))
            replica.engine_up, replica.engine_error = True, ""
            self.on_up(replica)

    def failed(self, replica: Replica, why: str) -> None:
        """The engine did not answer; place nothing there until a probe succeeds."""
        if replica.engine_up:
            log.warning("engine of %s is down: %s", replica.id, why)
            self._on_down(replica.id)
        replica.engine_up, replica.engine_error = False, why


def _tell_nobody(replica: Replica) -> None:
    pass

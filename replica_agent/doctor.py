"""What keeps a replica from being routed to by what it holds, or from fetching: each with the flag that changes it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvstore.identity import UNIT_TOKENS
from kvstore.messages import ModelFiles, Problem

if TYPE_CHECKING:
    from replica_agent.replica import Replica

_logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SETTLED_S = 5.0
"""What has been wrong for so long is logged: engine, events and pool come up one after the other."""

SILENT_BLOCKS = 8
"""Blocks of prompt that an engine computes without one event before that is found odd: what is cached already, from
before the agent's start, makes none."""


class Doctor:
    """Looks at one replica. Owns when each problem was first seen, and which of them the log has been told of.

    `problems` is what is wrong now. `run` logs each, once, until it goes away and comes back.
    """

    def __init__(self, replica: Replica, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: set[str] = set()
        self._quiet_since: float | None = None

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Logs what has been wrong for a while."""
        now, found = self._clock(), {problem.code: problem for problem in self.problems()}
        self._since = {code: self._since.get(code, now) for code in found}
        self._told &= found.keys()
        for code, problem in found.items():
            if code not in self._told and now - self._since[code] >= SETTLED_S:
                self._told.add(code)
                level = logging.INFO if problem.note else logging.WARNING
                _logger.log(level, "%s: %s; to change it: %s", code, problem.message, problem.fix)

    def check(self) -> None:
        """Asserts that the log was told of nothing that is not there."""
        assert self._told <= self._since.keys()

    def problems(self) -> list[Problem]:
        """What is wrong now. Each code appears once."""
        if not self._replica.engine_state().up:
            return [self._engine_down()]
        return [*self._events(), *self._names(), *self._pool()]

    def _engine_down(self) -> Problem:
        engine, why = self._replica.settings.engine, self._replica.engine_error
        if " 401" in why:
            fix = (
                "agent: --engine-api-key-file, or REPLICA_AGENT_ENGINE_API_KEY, with the key of the engine's --api-key"
            )
            return Problem(code="engine_key", message=f"the engine at {engine} refuses the agent: {why}", fix=fix)
        if "certificate verify failed" in why:
            fix = "agent: --engine-ca-file, --engine-server-name"
            return Problem(code="engine_tls", message=f"the engine at {engine} is not believed: {why}", fix=fix)
        message = f"the engine at {engine} does not answer" + (f": {why}" if why else "")
        return Problem(
            code="engine_down", message=message, fix="start the engine, or tell the agent where it is: --engine"
        )

    def _events(self) -> Iterator[Problem]:
        replica = self._replica
        subscriber, settings = replica.subscriber, replica.settings
        sources, metrics = replica.event_sources, replica.engine_state().metrics
        flag = self._events_flag()
        if metrics.prefix_caching is False:
            yield Problem(
                code="prefix_caching_off",
                message="the engine caches no prefixes: there is nothing to route by",
                fix="vLLM: --enable-prefix-caching",
            )
        elif not subscriber.connected and sources is not None and settings.dp_rank not in sources:
            whose = f" of rank {settings.dp_rank}" if sources else ""
            yield Problem(code="events_off", message=f"the engine publishes no KV events{whose}", fix=flag)
        elif not subscriber.connected:
            where = f"; it publishes at {sources[settings.dp_rank]['endpoint']}" if sources else ""
            yield Problem(
                code="events_unconnected",
                message=f"no connection to the engine's KV events at {settings.kv_events}{where}",
                fix=f"agent: --kv-events with the address of the engine's endpoint, as in {flag}",
            )
        elif subscriber.other_rank is not None:
            rank = subscriber.other_rank
            yield Problem(
                code="events_rank",
                message=f"{settings.kv_events} tells of data-parallel rank {rank}, not of {settings.dp_rank}",
                fix=f"agent: --dp-rank {rank}, or --kv-events with the port of rank {settings.dp_rank}",
            )
        elif subscriber.counts.malformed and not subscriber.counts.batches:
            yield Problem(
                code="events_unreadable",
                message=f"the engine's KV events cannot be read: {subscriber.last_error}",
                fix="engine and agent: versions that belong together; agent: --kv-events with the port of the events",
            )
        elif self._is_silent():
            yield Problem(
                code="events_silent",
                message=f"nothing comes from {settings.kv_events}, though the engine computes prompts",
                fix=f"agent: --kv-topic {settings.kv_topic!r} is to begin the engine's topic, as in {flag}",
            )
        yield from self._replay(sources, flag)

    def _replay(self, sources: dict[int, dict[str, Any]] | None, flag: str) -> Iterator[Problem]:
        settings, counts = self._replica.settings, self._replica.subscriber.counts
        source = (sources or {}).get(settings.dp_rank, {})
        if settings.kv_replay is None:
            fix = "agent: --kv-replay with the address of the engine's replay_endpoint"
            if not source.get("replay_endpoint"):
                fix += f", as in {flag}"
            message = "no replay of KV events: what was cached before a gap, or before the agent's start, is not known"
            yield Problem(code="replay_missing", message=message, fix=fix)
        elif counts.failed_replays and counts.failed_replays == counts.replays:
            message = f"the engine replays no KV events: {self._replica.subscriber.last_error}"
            yield Problem(code="replay_unanswered", message=message, fix=f"engine: replay_endpoint, as in {flag}")

    def _is_silent(self) -> bool:
        replica = self._replica
        tokens = replica.engine_state().metrics.prompt_tokens
        if replica.subscriber.counts.batches or tokens is None:
            self._quiet_since = None
            return False
        if self._quiet_since is None or tokens < self._quiet_since:
            self._quiet_since = tokens
        return tokens - self._quiet_since >= SILENT_BLOCKS * max(replica.block_size, UNIT_TOKENS)

    def _names(self) -> Iterator[Problem]:
        replica = self._replica
        if replica.block_size % UNIT_TOKENS:
            yield Problem(
                code="block_size",
                message=f"block size {replica.block_size} is not a multiple of {UNIT_TOKENS}: no block can be named",
                fix=f"vLLM: --block-size, SGLang: --page-size, a multiple of {UNIT_TOKENS}",
            )
        if not isinstance(replica.files, ModelFiles):
            yield Problem(
                code="model_files",
                message=f"prompts are identified by text, not exactly: {replica.files}",
                fix="agent: --model-dir with the directory of the model's tokenizer.json",
            )

    def _pool(self) -> Iterator[Problem]:
        replica = self._replica
        kv, socket = replica.kv, replica.settings.kv_socket
        flag = self._pool_flag(str(socket or "PATH"))
        if kv is None:
            message = "events and routing only: without a pool the agent saves and fetches no KV"
            yield Problem(code="pool_off", message=message, fix=f"agent: --kv-socket PATH; engine: {flag}", note=True)
        elif not kv.engine_connected and kv.refusal:
            message = f"events and routing only: the agent refused the engine's side of the pool: {kv.refusal}"
            yield Problem(code="pool_refused", message=message, fix="engine or agent: the setting that is named")
        elif not kv.engine_connected:
            message = f"events and routing only: no engine is connected to the KV pool at --kv-socket {socket}"
            yield Problem(code="pool_unconnected", message=message, fix=f"engine: {flag}")
        elif not kv.loads:
            message = "the engine saves KV and loads none: it would answer a failed load with an error"
            yield Problem(code="load_policy", message=message, fix=f"engine: kv_load_failure_policy, as in {flag}")
        if kv is not None and kv.keeper.unavailable and not any(each.between_hosts for each in kv.keeper.transports):
            why = "; ".join(kv.keeper.unavailable.values())
            yield Problem(
                code="pool_unreachable",
                message=f"no other host can read this pool, nor this one theirs: {why}",
                fix="agent: --data-port with a port that is free on --host, or --transports that there are here",
            )

    def _events_flag(self) -> str:
        settings = self._replica.settings
        endpoints = {"endpoint": settings.kv_events, "replay_endpoint": settings.kv_replay or "tcp://127.0.0.1:5657"}
        config: dict[str, Any] = {"publisher": "zmq"} | {
            name: _bound(endpoint, settings.dp_rank) for name, endpoint in endpoints.items()
        }
        if settings.kv_topic:
            config["topic"] = settings.kv_topic
        if self._engine == "reference":
            return f"--kv-events-endpoint {settings.kv_events} --kv-replay-endpoint {endpoints['replay_endpoint']}"
        name = "SGLang" if self._engine == "sglang" else "vLLM"
        if name == "vLLM":
            config = {"enable_kv_cache_events": True} | config
        return f"{name}'s --kv-events-config '{json.dumps(config)}'"

    def _pool_flag(self, socket: str) -> str:
        if self._engine == "sglang":
            return "none: there is no connector for SGLang"
        if self._engine == "reference":
            return f"--kv-socket {socket}"
        config = {
            "kv_connector": "PrefixGatewayConnector",
            "kv_connector_module_path": "replica_agent.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket},
        }
        return f"vLLM's --kv-transfer-config '{json.dumps(config)}'"

    @property
    def _engine(self) -> str:
        identity = self._replica.identity
        return "" if identity is None else identity.engine


def _bound(endpoint: str, dp_rank: int) -> str:
    """As the engine is told to bind it: on every address, at the port of its first rank."""
    address, _, port = endpoint.rpartition(":")
    if not address.startswith("tcp://") or not port.isdigit():
        return endpoint
    return f"tcp://*:{int(port) - dp_rank}"

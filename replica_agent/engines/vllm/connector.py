"""The class that vLLM loads: once in its scheduler, and once in every worker. It only passes on what vLLM says."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvstore.engine_messages import EngineHello
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.vllm import compat
from replica_agent.engines.vllm.errors import PoolUnusable
from replica_agent.engines.vllm.paged_cache import open_paged_cache
from replica_agent.engines.vllm.scheduler_side import SchedulerSide
from replica_agent.engines.vllm.stats import PoolStats
from replica_agent.engines.vllm.step import Cleared, Introduction, Step
from replica_agent.engines.vllm.worker_side import WorkerSide

_log = logging.getLogger(__name__)

# What the two sides tell each other does not depend on vLLM, which only carries it.
KVConnectorMetadata.register(Step)
KVConnectorWorkerMetadata.register(Cleared)
KVConnectorHandshakeMetadata.register(Introduction)


class PrefixGatewayConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Owns one side, or none: where the engine cannot exchange blocks it says why, once, and runs on without.

    Workers know what decides it, and introduce themselves to the scheduler's side before the engine takes requests.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._introduction = Introduction(reason="no KV cache was registered")
        self._resets = compat.Resets()

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not saved is computed by whoever needs it."""
        return False

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            facts = compat.read_facts(self._vllm_config, self._kv_cache_config, kv_caches)
            hello, share = facts.hello(), facts.share
            cache = open_paged_cache(compat.in_layer_order(kv_caches), facts.layout, share, blocks=facts.blocks)
        except PoolUnusable as error:
            self._introduction = Introduction(reason=str(error))
            return
        self._introduction = Introduction(hello)
        self._worker = WorkerSide(
            PoolLink(facts.socket, hello),
            cache,
            compat.device_of(kv_caches),
            rank=facts.rank,
            blocks=facts.blocks,
            writes=share.primary,
            observes=facts.rank == 0 and facts.pp == 1,
        )

    def get_handshake_metadata(self) -> Introduction:
        return self._introduction

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin in `wait_for_save`: none of them belongs to this step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No layer waits for anything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved, of all layers."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.finished(finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.failed()

    def build_connector_worker_meta(self) -> Cleared | None:
        return None if self._worker is None else self._worker.cleared()

    def get_kv_connector_stats(self) -> PoolStats | None:
        told = None if self._worker is None else self._worker.told()
        return None if told is None else PoolStats(data=told)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        return PoolStats(data=data or {})

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Introduction]) -> None:
        reasons = dict.fromkeys(each.reason for each in metadata.values() if each.hello is None)
        hellos = [each.hello for each in metadata.values() if each.hello is not None]
        try:
            if reasons:
                raise PoolUnusable("; ".join(reasons))
            socket = compat.read_socket(self._vllm_config)
            hello = _scheduler_hello(hellos)
        except PoolUnusable as error:
            _log.error("computing without a KV pool, as this engine cannot use one: %s", error)
            return
        if not hello.loads:
            _log.error(
                "saving KV and not loading any: set kv_load_failure_policy to recompute in --kv-transfer-config, "
                "else a load that fails is an error to the client"
            )
        self._scheduler = SchedulerSide(
            PoolLink(socket, hello),
            block_size=hello.block_size,
            blocks=self._kv_cache_config.num_blocks,
            ranks=len(hellos),
            loads=hello.loads,
            resets=self._resets,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._resets.watch(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if self._scheduler is None else self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            ids = compat.block_ids(blocks) if num_external_tokens else []
            self._scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return Step() if self._scheduler is None else self._scheduler.step(compat.scheduled(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(told, Cleared):
            self._scheduler.confirmed(told)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.clear()
        return True

    # In both.

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None


def _scheduler_hello(hellos: list[EngineHello]) -> EngineHello:
    """What the ranks agree on, said by the scheduler. Raises PoolUnusable naming what they do not."""
    told = [msgspec.structs.replace(hello, role="scheduler", rank=0) for hello in hellos]
    for other in told[1:]:
        for field in EngineHello.__struct_fields__:
            if getattr(other, field) != getattr(told[0], field):
                raise PoolUnusable(f"{field}: the ranks differ, {getattr(told[0], field)} and {getattr(other, field)}")
    return told[0]


def _log_as_vllm() -> None:
    """To where vLLM logs: it sets up its own loggers and no others."""
    ours, theirs = logging.getLogger("replica_agent"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)

"""Everything that is read of vLLM's own objects, in one place. The versions in `versions` agree in all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from replica_agent.engines.fingerprint import weights_fingerprint
from replica_agent.engines.vllm.errors import PoolUnusable
from replica_agent.engines.vllm.facts import Facts
from replica_agent.engines.vllm.scheduler_side import Scheduled
from replica_agent.engines.vllm.versions import minor_version

PLAIN_KV = ("auto", "float32", "float16", "bfloat16")
"""KV that is what the model computed: the others keep scales beside it, which do not travel."""

_SOCKET = "socket"
_UNNAMED = ("_name_or_path", "transformers_version", "_commit_hash")
"""Fields of a model's config that say where it came from and nothing of what it computes."""

_T = TypeVar("_T")


def _named(read: Callable[..., _T]) -> Callable[..., _T]:
    """What a version does not have is a reason like any other to run without the pool, not one to die."""

    @wraps(read)
    def wrapper(*arguments: Any) -> _T:
        try:
            return read(*arguments)
        except (AttributeError, ImportError, LookupError, StopIteration, TypeError) as error:
            raise PoolUnusable(f"vllm {vllm.__version__}: {type(error).__name__}: {error}") from error

    return wrapper


@_named
def read_facts(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, torch.Tensor]) -> Facts:
    """What this rank's worker knows, once its KV cache is there. Raises PoolUnusable naming what cannot work."""
    version = minor_version(vllm.__version__)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    spec = _only_spec(kv_cache_config)
    device = device_of(kv_caches)
    if cache.cache_dtype not in PLAIN_KV:
        raise PoolUnusable(f"--kv-cache-dtype: expected one of {', '.join(PLAIN_KV)}, got {cache.cache_dtype}")
    sizes = {cache.block_size, spec.block_size, getattr(kv_cache_config, "hash_block_size", None) or spec.block_size}
    if len(sizes) != 1:
        raise PoolUnusable(f"--block-size: blocks, and what is hashed, have different sizes: {sorted(sizes)}")
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size != 1:
        raise PoolUnusable("--decode-context-parallel-size, --prefill-context-parallel-size: must be 1")
    if model.enable_sleep_mode and device.type != "cpu":
        raise PoolUnusable("--enable-sleep-mode: takes away the memory that blocks are copied from")
    indexes = sorted(map(_layer_index, kv_caches))
    if indexes != list(range(indexes[0], indexes[0] + len(indexes))):
        raise PoolUnusable(f"layers: expected consecutive ones with a KV cache each, got {indexes}")
    return Facts(
        # The second half tells two lives apart that were given the same name on the command line.
        engine_id=f"{transfer.engine_id}-{vllm_config.instance_id}",
        socket=read_socket(vllm_config),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        rank=get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tp_group().rank_in_group,
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        blocks=kv_cache_config.num_blocks,
        first_layer=indexes[0],
        rank_layers=len(indexes),
        hash_algorithm=cache.prefix_caching_hash_algo,
        interior=_interior(vllm_config, kv_caches),
        loads=transfer.kv_load_failure_policy == "recompute",
        identity={
            "vllm": version,
            "model": str(model.served_model_name),
            "weights": _weights(vllm_config),
            "config": _config_digest(model.hf_text_config),
            "quantization": str(model.quantization),
            "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        },
    )


@_named
def read_socket(vllm_config: Any) -> str:
    """Where the agent listens. Raises PoolUnusable naming the key."""
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    path = extra.pop(_SOCKET, None)
    if extra:
        raise PoolUnusable(f"kv_connector_extra_config: {', '.join(sorted(extra))}: the only key is {_SOCKET}")
    if not isinstance(path, str) or not path:
        raise PoolUnusable(f"kv_connector_extra_config: {_SOCKET}: expected the agent's --kv-socket, got {path!r}")
    return path.replace("{dp_rank}", str(vllm_config.parallel_config.data_parallel_index))


@_named
def device_of(kv_caches: dict[str, torch.Tensor]) -> torch.device:
    """Where the KV cache is."""
    return next(iter(kv_caches.values())).device


@_named
def in_layer_order(caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The KV caches of a rank's layers, first layer first."""
    return [caches[name] for name in sorted(caches, key=_layer_index)]


def scheduled(output: Any) -> Iterator[Scheduled]:
    """The requests in a step of the scheduler."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.block_ids[0], True, new.num_computed_tokens, tokens[new.req_id])
    cached = output.scheduled_cached_reqs
    for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        resumed = request in cached.resumed_req_ids
        yield Scheduled(request, blocks[0] if blocks else (), resumed, computed, tokens[request])


def block_ids(blocks: Any) -> list[int]:
    """The blocks of a request that vLLM has just allocated for, all of them."""
    return list(blocks.get_block_ids()[0])


class Resets:
    """Counts how often vLLM has dropped its prefix cache: it does so by making a new index, and tells nobody when it is
    idle. May be called by any thread; a reset is counted once somebody calls."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._index: Any = None
        self._count = 0

    def watch(self, block_pool: Any) -> None:
        """From now on this block pool's."""
        self._pool, self._index = block_pool, getattr(block_pool, "cached_block_hash_to_block", None)

    def __call__(self) -> int:
        index = getattr(self._pool, "cached_block_hash_to_block", None)
        if index is not self._index:
            self._index = index
            self._count += 1
        return self._count


def _only_spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    # Its subclasses keep something else, or less, than K and V of every token.
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec:
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise PoolUnusable(f"model: only models with full attention in every layer, KV cache groups are: {kinds}")
    (spec,) = specs
    if spec.head_size_v != spec.head_size:
        raise PoolUnusable(f"head_dim: K has {spec.head_size} and V {spec.head_size_v}, expected the same")
    return spec


def _layer_index(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise PoolUnusable(f"layers: cannot tell which one {name!r} is")
    return numbers[0]


def _interior(vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> str:
    """How K and V lie in one head's part of a block. On a CPU the instructions and the kernel's own block decide, on an
    accelerator the backend alone: in what order it has heads and tokens in memory is undone by the copy."""
    names = sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config, list(kv_caches)))
    if len(names) != 1:
        raise PoolUnusable(f"attention backend: expected one for all layers, got {', '.join(names) or 'none'}")
    if device_of(kv_caches).type != "cpu":
        return str(names[0])
    layers = vllm_config.compilation_config.static_forward_context
    kinds = {(str(getattr(layers[name], "isa", "")), cache.shape[2]) for name, cache in kv_caches.items()}
    if len(kinds) != 1:
        raise PoolUnusable(f"attention backend: its layers differ in instructions or block size: {sorted(kinds)}")
    instructions, tokens = kinds.pop()
    return f"{names[0]}:{instructions}:{tokens}:{torch.backends.cpu.get_cpu_capability()}"


def _weights(vllm_config: Any) -> str:
    """What tells this engine's weights from all others."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy:{model.seed}"
    directory = Path(model.model)
    if directory.is_dir():
        if not any(directory.glob("*.safetensors")):
            raise PoolUnusable(f"weights: no *.safetensors in {directory} to tell them from others by")
        return weights_fingerprint(directory)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise PoolUnusable(f"weights: {model.model} is no directory, and its revision is not known")
    return f"{model.model}@{commit}"


def _config_digest(config: Any) -> str:
    told = {name: value for name, value in config.to_dict().items() if name not in _UNNAMED}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()

"""What this engine says of itself to the agent's pool: all that decides the bytes of a block, beside its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

from kvstore.engine_messages import EngineHello
from kvstore.namespace import SLOT_LAYOUT
from replica_agent.engines.fingerprint import weights_fingerprint
from replica_agent.reference.kv_cache import PagedKv
from replica_agent.reference.weights import ModelConfig


def engine_hello(model: str, directory: Path, config: ModelConfig, kv: PagedKv, dtype: str) -> EngineHello:
    """The hello of one life of an engine that serves `model` from `directory`. Reads at most 4 MiB of each file."""
    return EngineHello(
        engine_id=uuid4().hex,
        role="both",
        layers=kv.layers,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        dtype=dtype,
        layout=SLOT_LAYOUT,
        block_size=kv.block_size,
        block_bytes=kv.block_bytes,
        hash_algorithm="sha256",
        identity={
            "model": model,
            "weights": weights_fingerprint(directory),
            "rope": json.dumps(dict(config.rope), sort_keys=True),
            "norm_eps": repr(config.norm_eps),
        },
    )

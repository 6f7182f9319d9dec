"""What this engine says of itself to the agent's pool: all that decides the bytes of a block, beside its tokens."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from uuid import uuid4

from kvstore.engine_messages import EngineHello
from kvstore.namespace import SLOT_LAYOUT
from replica_agent.reference.kv_cache import PagedKv
from replica_agent.reference.weights import ModelConfig

_SAMPLE_BYTES = 65_536
_SAMPLES = 64


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


def weights_fingerprint(directory: Path) -> str:
    """Names, sizes and samples of a model's `*.safetensors`, hashed: 64 hex digits.

    64 samples of 64 KiB, evenly spread from the first byte to the last, tell checkpoints apart: training changes all
    tensors. One that differs from another in a few bytes alone could pass for it.
    """
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        last = max(size - _SAMPLE_BYTES, 0)
        with file.open("rb") as reader:
            for sample in range(_SAMPLES):
                digest.update(os.pread(reader.fileno(), _SAMPLE_BYTES, last * sample // (_SAMPLES - 1)))
    return digest.hexdigest()

"""How many bytes of KV a token costs, from a model's own description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.errors import GeometryError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


class KvGeometry(msgspec.Struct, frozen=True):
    """Shape of one token's KV over the whole model: `layers` x K and V x `kv_heads` x `head_dim` of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        """Raises GeometryError naming the field, also for one that came over the wire."""
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise GeometryError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for field in ("layers", "kv_heads", "head_dim"):
            if getattr(self, field) <= 0:
                raise GeometryError(f"{field}: expected a positive integer, got {getattr(self, field)!r}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token occupies, over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens."""
        return self.bytes_per_token * block_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> KvGeometry:
        """From a Hugging Face `config.json` with multi-head or grouped-query attention.

        `dtype` overrides the one in the config (engines may keep KV in another). Raises GeometryError naming the field
        that is missing or that this version cannot compute from.
        """
        if config.get("kv_lora_rank"):
            raise GeometryError("kv_lora_rank: latent attention (MLA) is not supported yet")
        heads = _positive(config, "num_attention_heads")
        kv_heads = _positive(config, "num_key_value_heads", heads)
        head_dim = _positive(config, "head_dim", 0) or _positive(config, "hidden_size") // heads
        name = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return cls(layers=_positive(config, "num_hidden_layers"), kv_heads=kv_heads, head_dim=head_dim, dtype=name)


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        if default is None:
            raise GeometryError(f"{field}: missing from the model config")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise GeometryError(f"{field}: expected a positive integer, got {value!r}")
    return value

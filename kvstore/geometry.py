"""How many bytes of KV a token costs, from a model's own description, and how ranks split them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.errors import GeometryError
from kvstore.models import language_model, read_attention

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}

MAX_EXTENT = 65_536
"""Layers, heads and dims are no more than that."""

MAX_WINDOW = 1 << 53
"""Tokens of a sliding window, as many as a count may be; JSON, in which a geometry travels, has no largest number."""


class KvGeometry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shape of one token's KV over the whole model: `layers` x `kv_heads` x (K of `head_dim`, V) elements of `dtype`.

    `v_head_dim` is V's dim where it differs from K's. 0 means latent attention (MLA): there is no V, and the one head
    is the latent of kv_lora_rank + qk_rope_head_dim elements that every rank of a TP group keeps whole. `windows` is
    each layer's sliding window in tokens, 0 for full attention, or empty where every layer is full.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises GeometryError naming the field, also for one that came over the wire."""
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise GeometryError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for field in ("layers", "kv_heads", "head_dim"):
            if getattr(self, field) <= 0:
                raise GeometryError(f"{field}: expected a positive integer, got {getattr(self, field)!r}")
        for field in ("layers", "kv_heads", "head_dim", "v_head_dim"):
            if (getattr(self, field) or 0) > MAX_EXTENT:
                raise GeometryError(f"{field}: at most {MAX_EXTENT}, got {getattr(self, field)!r}")
        if self.v_head_dim is not None and self.v_head_dim < 0:
            raise GeometryError(f"v_head_dim: expected 0 or a positive integer, got {self.v_head_dim!r}")
        if self.latent and self.kv_heads != 1:
            raise GeometryError(f"kv_heads: latent attention keeps one, got {self.kv_heads!r}")
        if self.windows and (len(self.windows) != self.layers or min(self.windows) < 0):
            raise GeometryError(f"windows: expected one for each of {self.layers} layers, 0 or more tokens each")
        if max(self.windows, default=0) > MAX_WINDOW:
            raise GeometryError(f"windows: at most {MAX_WINDOW} tokens each")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> KvGeometry:
        """From a Hugging Face `config.json`, also a multimodal one.

        `dtype` overrides the one in the config (engines may keep KV in another). Raises GeometryError naming the field
        that is missing or that this version cannot compute from.
        """
        model = language_model(config)
        attention = read_attention(model)
        return cls(
            layers=attention.layers,
            kv_heads=attention.kv_heads,
            head_dim=attention.key_dim,
            dtype=dtype or model.get("dtype") or model.get("torch_dtype") or "bfloat16",
            v_head_dim=None if attention.value_dim == attention.key_dim else attention.value_dim,
            windows=attention.windows,
        )

    @property
    def latent(self) -> bool:
        """Whether one latent stands for all heads' K and V (MLA)."""
        return self.v_head_dim == 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer of one head: its K and its V."""
        value_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return (self.head_dim + value_dim) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token occupies, over all layers and heads, while it is inside every window."""
        return self.layers * self.kv_heads * self.row_bytes

    @property
    def growth_per_token(self) -> int:
        """Bytes that one more token adds to a sequence longer than every window: those of the full layers."""
        return (self.layers - sum(window > 0 for window in self.windows)) * self.kv_heads * self.row_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens, over all layers and heads."""
        return self.bytes_per_token * block_size

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of `tokens` needs: a windowed layer keeps the last of its window only."""
        return self._kept(tokens, range(self.layers)) * self.kv_heads * self.row_bytes

    def heads_per_rank(self, tp: int) -> int:
        """KV heads on each rank of a TP group; one head is not split, and a latent not at all."""
        return -(-self.kv_heads // tp)

    def replication(self, tp: int) -> float:
        """How often a TP group of `tp` keeps each head: 1 while `tp` divides the heads, 2 with 16 ranks and 8 heads."""
        return self.heads_per_rank(tp) * tp / self.kv_heads

    def rank_bytes_per_token(self, tp: int, pp: int = 1) -> int:
        """Bytes per token on a rank of the largest of `pp` stages. Raises GeometryError for more stages than layers."""
        return max(map(len, stage_layers(self.layers, pp))) * self.heads_per_rank(tp) * self.row_bytes

    def rank_sequence_bytes(self, tokens: int, tp: int, stage: range) -> int:
        """Bytes that a sequence of `tokens` needs on each rank of the stage with these layers."""
        return self._kept(tokens, stage) * self.heads_per_rank(tp) * self.row_bytes

    def _kept(self, tokens: int, layers: range) -> int:
        """Tokens kept, summed over `layers`."""
        if not self.windows:
            return tokens * len(layers)
        return sum(min(tokens, self.windows[layer] or tokens) for layer in layers)


def stage_layers(layers: int, pp: int) -> list[range]:
    """The layers of each pipeline stage, split as vLLM does (`get_pp_indices`).

    Layers that are left over go one each to the last stages but one, backwards: the last stage has the output head to
    compute and gets none. Raises GeometryError for more stages than layers.
    """
    if not 1 <= pp <= layers:
        raise GeometryError(f"pp: {pp} stages cannot share {layers} layers")
    each, left = divmod(layers, pp)
    counts = [each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)]
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

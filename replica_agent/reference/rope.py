"""Rotary position embedding, half-rotation form (as Hugging Face Llama checkpoints expect)."""

from __future__ import annotations

import math

import torch

from replica_agent.reference.errors import ModelError
from replica_agent.reference.weights import ModelConfig


class Rope:
    """Cosines and sines of every position below `positions`; shape [positions, 1, head_dim / 2]. Never changes."""

    def __init__(self, config: ModelConfig, positions: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(config))
        self.cos = angles.cos().to(dtype).unsqueeze(1)
        self.sin = angles.sin().to(dtype).unsqueeze(1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, 1, head_dim / 2], of the given positions [T]."""
        return self.cos[positions], self.sin[positions]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`heads` [T, H, head_dim] turned by their positions' angles."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    rope = config.rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain: torch.Tensor = 1.0 / (float(rope.get("rope_theta", 10000.0)) ** exponents)
    if kind == "default":
        return plain
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return plain / factor
    if kind != "llama3":
        raise ModelError(f"rope_type {kind!r} is not supported, only default, linear and llama3 are")
    # Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, those between are blended.
    original, low, high = (
        float(rope[name]) for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * math.pi / plain
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain

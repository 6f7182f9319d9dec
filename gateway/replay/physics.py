"""How long a simulated replica computes, and what its KV takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.errors import SettingsError
from gateway.plan.inputs import read_model
from kvstore.cost import LinkEstimate
from kvstore.models import KNOWN_MODELS

TPOT_S = 0.02
"""Seconds from one output token to the next that replicas are run to keep."""

FLOPS_PER_S, BYTES_PER_S = 600e12, 4.8e12
"""One GPU: what dense bf16 prefill achieves on a Hopper of 989 TFLOP/s, and the HBM of an H200."""

MOST_DECODE_SHARE = 0.8


class Physics(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. A prefill of n tokens after p cached ones takes

        (weight_flops x n + pair_flops x n x (p + n / 2)) / flops_per_s / (1 - u)

    seconds, where u is the share of each output interval that decode steps take: weights and the KV of all sequences
    that decode are read once a step at `bytes_per_s`. Replicas prefill one request after the other.
    """

    name: str
    weight_flops: float
    pair_flops: float
    token_bytes: int
    weight_bytes: float
    flops_per_s: float
    bytes_per_s: float

    def prefill_s(self, new: float, past: float) -> float:
        """Seconds of a prefill of `new` tokens after `past` cached ones while nothing decodes."""
        return new * self._linear + self._quadratic * new * (past + new / 2)

    def decode_share(self, sequences: int, context: int) -> float:
        """u, with `sequences` that decode over `context` tokens in sum."""
        if not sequences:
            return 0.0
        step_s = (self.weight_bytes + context * self.token_bytes) / self.bytes_per_s
        return min(MOST_DECODE_SHARE, step_s / TPOT_S)

    def fetch_s(self, tokens: int, link: LinkEstimate) -> float:
        """Seconds of reading the KV of `tokens` from a peer."""
        return link.seconds(tokens * self.token_bytes)

    @property
    def attention(self) -> float:
        """How much longer a token's prefill takes for each token before it, as a share of the first one's."""
        return self.pair_flops / self.weight_flops

    @property
    def _linear(self) -> float:
        return self.weight_flops / self.flops_per_s

    @property
    def _quadratic(self) -> float:
        return self.pair_flops / self.flops_per_s


KNOWN = {
    "llama-3.1-8b": Physics(
        name="llama-3.1-8b",
        weight_flops=2 * 8e9,
        pair_flops=4 * 32 * 4096,
        token_bytes=131_072,
        weight_bytes=16e9,
        flops_per_s=FLOPS_PER_S,
        bytes_per_s=BYTES_PER_S,
    ),
    "llama-3.1-70b": Physics(
        name="llama-3.1-70b",
        weight_flops=2 * 70e9,
        pair_flops=4 * 80 * 8192,
        token_bytes=327_680,
        weight_bytes=140e9,
        flops_per_s=4 * FLOPS_PER_S,
        bytes_per_s=4 * BYTES_PER_S,
    ),
}
"""Models known by name, in round numbers of weights: on one GPU, and the larger one on four (tensor parallelism)."""


def read_physics(model: str, flops_per_s: float | None = None, bytes_per_s: float | None = None) -> Physics:
    """A model known by name, or described by a `config.json`, on one GPU unless other rates are given.

    Raises SettingsError that begins with `--model`.
    """
    found = KNOWN.get(model.lower())
    if found is None:
        if model.lower() not in KNOWN_MODELS and not Path(model).exists():
            raise SettingsError(f"--model: {model} is neither a file nor one of {', '.join([*KNOWN, *KNOWN_MODELS])}")
        read = read_model(model)
        found = Physics(
            name=Path(model).name,
            weight_flops=2.0 * read.shape.active_weights,
            pair_flops=float(read.shape.pair_flops),
            token_bytes=read.geometry.bytes_per_token,
            weight_bytes=2.0 * read.shape.weights,
            flops_per_s=FLOPS_PER_S,
            bytes_per_s=BYTES_PER_S,
        )
    return msgspec.structs.replace(
        found, flops_per_s=flops_per_s or found.flops_per_s, bytes_per_s=bytes_per_s or found.bytes_per_s
    )

"""The next token from logits: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

import torch

from replica_agent.reference.sequence import SamplingParams

_GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: logits divided by less would overflow."""


class Sampler:
    """Draws for one sequence. Owns that sequence's random state, so what it draws does not depend on its neighbours."""

    def __init__(self, params: SamplingParams, fallback_seed: int) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if params.temperature >= _GREEDY_BELOW:
            seed = fallback_seed if params.seed is None else params.seed
            self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))

    def draw(self, logits: torch.Tensor) -> int:
        """A token id, given one row of float32 logits [vocab]."""
        params = self._params
        if self._generator is None:
            return int(logits.argmax())
        count = min(params.top_k, len(logits)) if params.top_k > 0 else len(logits)
        if count < len(logits) or params.top_p < 1:
            values, tokens = logits.topk(count)
        else:
            values, tokens = logits, None
        weights = torch.softmax(values / params.temperature, dim=-1)
        if params.top_p < 1:
            # Sorted by topk. A token is kept while those before it have not yet reached top_p; the first always is.
            weights = weights * ((weights.cumsum(-1) - weights) < params.top_p)
        choice = torch.multinomial(weights, 1, generator=self._generator)
        return int(choice if tokens is None else tokens[choice])

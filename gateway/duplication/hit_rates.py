"""Hit rates: what the fleet reached, what any fleet could have, and what one cache of its size would have."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gateway.duplication.one_cache import KEPT_BLOCKS, Hits, OneCache
from gateway.identity.prompt import PromptIdentity

MOST_MODELS = 32
"""Models whose traffic is followed; of more, those that were asked for longest ago are forgotten."""


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the answered requests of one model whose engines said what was cached, and their quotients.

    `achieved`: cached tokens over prompt tokens, tokens that failed to load taken off. `reachable`: what one endless
    cache, given the same prompts in the same order, would have had, in whole blocks. `ideal`: what one cache of the
    fleet's whole capacity, at most 8.4 million tokens in blocks of 16, would have had, evicting what was used longest
    ago, over the `ideal_prompt_tokens` of requests at whose time that capacity was known. Quotients are None before the
    first token.
    """

    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    reachable_tokens: float
    ideal_tokens: float
    ideal_prompt_tokens: int
    achieved: float | None
    reachable: float | None
    ideal: float | None


class Fed(NamedTuple):
    """What `HitRates.placed` found for one request, until it is answered."""

    hits: Hits
    block_tokens: int
    prompt_tokens: int


class _Sums:
    __slots__ = ("cache", "cached", "ideal", "ideal_prompt", "prompt", "reachable", "requests")

    def __init__(self, limit_blocks: int) -> None:
        self.cache = OneCache(limit_blocks)
        self.requests = self.prompt = self.cached = self.ideal_prompt = 0
        self.reachable = self.ideal = 0.0


class HitRates:
    """Feeds one cache for each model with the prompts that are placed, and adds up what came of those answered.

    What engines keep of generated tokens is not fed, since the gateway does not know their ids: a fleet whose answers
    come back in the next turn's prompt can achieve more than is called reachable. Prompts that are identified by their
    text count with an estimate of their tokens, put right by what the engine says.

    Owns a `OneCache` per model, of `limit_blocks` keys each, 38 MB with the default, for as many as `MOST_MODELS`.
    Adapters that share an engine's cache are each counted as if they had it alone, and come and go.
    """

    def __init__(self, limit_blocks: int = KEPT_BLOCKS) -> None:
        self._limit = limit_blocks
        self._models: dict[str, _Sums] = {}

    def placed(self, model: str, identity: PromptIdentity, block_units: int, capacity_tokens: int) -> Fed | None:
        """A prompt was placed, for the first time. `block_units` are those of the smallest engine block of the model;
        `capacity_tokens` is what all its replicas hold together, 0 where that is not known. None without keys."""
        keys = identity.keys[block_units - 1 :: block_units]
        if not keys:
            return None
        sums = self._models.pop(model, None) or _Sums(self._limit)
        self._models[model] = sums  # in the order of their last prompts
        if len(self._models) > MOST_MODELS:
            del self._models[next(iter(self._models))]
        block_tokens = block_units * identity.unit_tokens
        # The engine computes the last token in any case.
        hits = sums.cache.feed(keys, (identity.tokens - 1) // block_tokens, capacity_tokens // block_tokens)
        return Fed(hits, block_tokens, identity.tokens)

    def answered(self, model: str, fed: Fed, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine answered it: `cached_tokens` of its `prompt_tokens` were not computed."""
        sums = self._models.get(model)
        if sums is None:
            return
        tokens = fed.block_tokens * prompt_tokens / fed.prompt_tokens
        sums.requests += 1
        sums.prompt += prompt_tokens
        sums.cached += cached_tokens
        sums.reachable += fed.hits.endless * tokens
        if fed.hits.bounded is not None:
            sums.ideal_prompt += prompt_tokens
            sums.ideal += fed.hits.bounded * tokens

    def rates(self) -> list[HitRate]:
        """One of each model, in the order of their names."""
        return [_rate(model, sums) for model, sums in sorted(self._models.items()) if sums.requests]

    def check(self) -> None:
        """Asserts that no bounded cache was better than an endless one, and what the caches assert."""
        assert len(self._models) <= MOST_MODELS
        for sums in self._models.values():
            sums.cache.check()
            assert sums.ideal <= sums.reachable + 1e-6
            assert sums.cached <= sums.prompt


def _rate(model: str, sums: _Sums) -> HitRate:
    def over(tokens: float, prompt: int) -> float | None:
        return tokens / prompt if prompt else None

    return HitRate(
        model=model,
        requests=sums.requests,
        prompt_tokens=sums.prompt,
        cached_tokens=sums.cached,
        reachable_tokens=sums.reachable,
        ideal_tokens=sums.ideal,
        ideal_prompt_tokens=sums.ideal_prompt,
        achieved=over(sums.cached, sums.prompt),
        reachable=over(sums.reachable, sums.prompt),
        ideal=over(sums.ideal, sums.ideal_prompt),
    )

"""What answering a request on a replica costs, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from gateway.placement.placement import ReplicaView
from gateway.placement.settings import PlacementSettings
from kvstore.identity import UNIT_TOKENS


class Terms(NamedTuple):
    """Seconds until a request's turn, of its own uncached prefill, and the price of what it evicts."""

    queue_s: float
    prefill_s: float
    eviction_s: float

    @property
    def total_s(self) -> float:
        """Their sum: what replicas are compared by."""
        return self.queue_s + self.prefill_s + self.eviction_s


class CostModel:
    """Queue wait + prefill of the missing tokens + price of the evicted tokens.

    Evicted tokens are the new blocks that the pool has no free ones for, each priced at the seconds its own prefill
    takes, times `eviction_weight`: the chance that it would have been used again. One half makes a missing token cost
    1.5 of its prefill on a full cache, the factor that simulation chose where the chance was not learned; certainty (1)
    was worse than no price at all. `_reuse_chance` is where a learned curve takes the constant's place.
    """

    def __init__(self, settings: PlacementSettings) -> None:
        self._eviction_weight = settings.eviction_weight

    def terms(self, view: ReplicaView, tokens: int, cached_tokens: int, pending_blocks: int = 0) -> Terms:
        """Cost of a prompt of `tokens`, `cached_tokens` of them held by `view` in whole blocks.

        `pending_blocks` are blocks that placed requests will fill and that `view.held_blocks` does not count yet.
        """
        speed = view.prefill_tokens_per_s
        evicted_s = 0.0
        if view.capacity_blocks:
            block_tokens = view.block_units * UNIT_TOKENS
            new = -(-tokens // block_tokens) - cached_tokens // block_tokens
            free = max(0, view.capacity_blocks - view.held_blocks - pending_blocks)
            if new > free:
                evicted_s = (new - free) * block_tokens / speed * self._reuse_chance()
        return Terms(view.queued_prefill_tokens / speed, (tokens - cached_tokens) / speed, evicted_s)

    def _reuse_chance(self) -> float:
        return self._eviction_weight

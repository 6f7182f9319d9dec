"""What answering a request on a replica costs, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from gateway.placement.placement import ReplicaView
from gateway.placement.settings import PlacementSettings
from kvstore.identity import UNIT_TOKENS


class Terms(NamedTuple):
    """Seconds until a request's turn, of its own uncached prefill, the price of what it evicts, and their weighted sum,
    by which replicas are compared."""

    queue_s: float
    prefill_s: float
    eviction_s: float
    total_s: float


class CostModel:
    """Queue wait + `prefill_weight` x prefill of the missing tokens + price of the evicted tokens.

    Prefill weighs more than waiting because it also delays whoever comes next and leaves one more copy behind. Sixteen
    requests at one instant with one new prefix of 3,000 tokens end as 8 copies on 8 replicas with a weight of 1, as 4
    with 1.5, which is what the bound on prefill asks for (`tests/behaviours/test_placement.py`). Mean TTFT does not
    choose: on chat and agent traces weights from 1 to 2 differ by less than the noise between samples.
    Evicted tokens are the new blocks that the pool has no free ones for, each priced at the seconds its own prefill
    takes, times `eviction_weight`, which stands for the chance that it would have been used again. A guess must be low:
    in the same simulation certainty, at a weight of 2, was worse than no price at all (1.265 and 2.582 against 1.084
    and 1.719). One half is enough to fill free caches first. `_reuse_chance` is where a learned curve takes over.
    """

    def __init__(self, settings: PlacementSettings) -> None:
        self._prefill_weight = settings.prefill_weight
        self._eviction_weight = settings.eviction_weight

    def terms(self, view: ReplicaView, tokens: int, cached_tokens: int, pending_blocks: int = 0) -> Terms:
        """Cost of a prompt of `tokens`, `cached_tokens` of them held by `view` in whole blocks.

        `pending_blocks` are blocks that placed requests will fill and that `view.held_blocks` does not count yet.
        """
        speed = view.prefill_tokens_per_s
        queue_s, prefill_s, evicted_s = view.queued_prefill_tokens / speed, (tokens - cached_tokens) / speed, 0.0
        if view.capacity_blocks:
            block_tokens = view.block_units * UNIT_TOKENS
            new = -(-tokens // block_tokens) - cached_tokens // block_tokens
            free = max(0, view.capacity_blocks - view.held_blocks - pending_blocks)
            if new > free:
                evicted_s = (new - free) * block_tokens / speed * self._reuse_chance()
        return Terms(queue_s, prefill_s, evicted_s, queue_s + self._prefill_weight * prefill_s + evicted_s)

    def _reuse_chance(self) -> float:
        return self._eviction_weight

"""What answering a request on a replica costs, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.placement.placement import FetchPlan, ReplicaView
from gateway.placement.settings import PlacementSettings
from kvstore.cost import decide


class Terms(NamedTuple):
    """Seconds until a request's turn, of fetching, of its own uncached prefill, the price of what it evicts, and their
    weighted sum, by which replicas are compared."""

    queue_s: float
    fetch_s: float
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

    A fetch goes on while the request waits for its turn, so only what is longer than the queue counts. It is cheap, but
    not free: it leaves one more copy behind, and it may fail. So it is charged `band_tokens` of prefill. A holder
    within the band of ties is then never passed over for a replica that would have to fetch, nor is an earlier copy
    for a new one, and a replica that may as well compute counts as it would without.
    """

    def __init__(self, settings: PlacementSettings) -> None:
        self._prefill_weight = settings.prefill_weight
        self._eviction_weight = settings.eviction_weight
        self._fetch_tokens = settings.band_tokens
        self._margin = settings.fetch_margin
        self._least_deadline_s = settings.fetch_least_deadline_s
        self._max_deadline_s = settings.fetch_max_deadline_s

    def terms(
        self,
        view: ReplicaView,
        tokens: int,
        cached_tokens: int,
        pending_blocks: int = 0,
        *,
        fetched_tokens: int = 0,
        fetch_s: float = 0.0,
    ) -> Terms:
        """Cost of a prompt of `tokens`, `cached_tokens` of them held by `view` in whole blocks.

        `pending_blocks` are blocks that placed requests will fill and that `view.held_blocks` does not count yet.
        `fetched_tokens` after the cached ones come from a peer in `fetch_s`.
        """
        speed = view.prefill_tokens_per_s
        queue_s, prefill_s, evicted_s = view.queued_prefill_tokens / speed, (tokens - cached_tokens) / speed, 0.0
        if view.capacity_blocks:
            block_tokens = view.block_tokens
            new = -(-tokens // block_tokens) - cached_tokens // block_tokens
            free = max(0, view.capacity_blocks - view.held_blocks - pending_blocks)
            if new > free:
                evicted_s = (new - free) * block_tokens / speed * self._reuse_chance()
        total_s = queue_s + self._prefill_weight * prefill_s + evicted_s
        if fetched_tokens:
            prefill_s = (tokens - cached_tokens - fetched_tokens) / speed
            charged_s = max(queue_s, fetch_s) + self._fetch_tokens / speed
            total_s = min(total_s, charged_s + self._prefill_weight * prefill_s + evicted_s)
        return Terms(queue_s, fetch_s, prefill_s, evicted_s, total_s)

    def fetch(
        self, view: ReplicaView, tokens: int, cached_tokens: int, sources: Sequence[str], served_tokens: int
    ) -> FetchPlan | None:
        """Reading what `view` lacks of a prompt from the nearest of `sources`, the first of equals, if that pays.

        Each source serves the first `served_tokens`, in whole blocks; `view` reports to hold `cached_tokens` itself.
        """
        state = view.fetch
        if state is None:
            return None
        block_tokens = view.block_tokens
        # What is fetched goes through the replica's own pool.
        served_tokens = min(served_tokens, cached_tokens + state.slots * block_tokens)
        if not view.block_bytes or served_tokens <= cached_tokens:
            return None
        size = (served_tokens - cached_tokens) // block_tokens * view.block_bytes
        prices = {name: state.links.get(name, state.link).seconds(size) for name in sources if name != view.id}
        if not prices:
            return None
        source = min(prices, key=prices.__getitem__)
        speed = view.prefill_tokens_per_s
        rest_s, recompute_s = (tokens - served_tokens) / speed, (tokens - cached_tokens) / speed
        if not decide(prices[source], rest_s, recompute_s, self._margin):
            return None
        return FetchPlan(
            source=source,
            blocks=served_tokens // block_tokens,
            tokens=served_tokens - cached_tokens,
            bytes=size,
            seconds=prices[source],
            deadline_s=min(max(recompute_s - rest_s, self._least_deadline_s), self._max_deadline_s),
            counted=state.acts,
        )

    def _reuse_chance(self) -> float:
        return self._eviction_weight

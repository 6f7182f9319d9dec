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
    """Queue wait + `prefill_weight` x prefill of the missing tokens + `eviction_weight` x price of the evicted ones.

    Prefill weighs more than waiting because it also delays whoever comes next and leaves one more copy behind. Sixteen
    requests at one instant with one new prefix of 3,000 tokens end as 8 copies on 8 replicas with a weight of 1, as 4
    with 1.5, which is what the bound on prefill asks for (`tests/behaviours/test_placement.py`). Mean TTFT does not
    choose: on chat and agent traces weights from 1 to 2.5 differ by less than the noise between samples
    (`benchmarks/README.md`, "Constants of placement", here and below).
    Evicted tokens are what the replica's cache must give up for the new blocks, each priced at the effort of computing
    it again times the chance that it is used again (`Evictions`), and weigh `eviction_weight`: whoever comes back for
    them waits, and so do those behind. Without that agents wait a fifth to a quarter longer; from 1 to 4 it makes no
    difference beyond the noise.

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
        evicted_tokens: float = 0.0,
        *,
        fetched_tokens: int = 0,
        fetch_s: float = 0.0,
    ) -> Terms:
        """Cost of a prompt of `tokens`, `cached_tokens` of them held by `view` in whole blocks.

        Making room for the others costs `evicted_tokens` of prefill.
        `fetched_tokens` after the cached ones come from a peer in `fetch_s`.
        """
        speed = view.prefill_tokens_per_s
        queue_s = view.queue_s
        prefill_s = view.prefill_s(tokens - cached_tokens, cached_tokens)
        evicted_s = self._eviction_weight * evicted_tokens / speed
        total_s = queue_s + self._prefill_weight * prefill_s + evicted_s
        if fetched_tokens:
            past = cached_tokens + fetched_tokens
            prefill_s = view.prefill_s(tokens - past, past)
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
        rest_s = view.prefill_s(tokens - served_tokens, served_tokens)
        recompute_s = view.prefill_s(tokens - cached_tokens, cached_tokens)
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

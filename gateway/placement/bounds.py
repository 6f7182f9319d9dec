"""The two bounds on a replica's load."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.placement.placement import ReplicaView
from gateway.placement.settings import PlacementSettings


class Bounds:
    """Who may take one more request. Lives for one decision; holds the fleet's totals at its start.

    A replica i with weight w_i (times its warmth, where it has just come up) is within its bounds when both hold, for
    its queued prefill seconds q and its running sequences n:

        q_i + a_i <= (1 + eps) x w_i/W x (Q + a_i) + floor_i
        n_i + 1   <= (1 + eps) x w_i/W x (N + 1) + floor_sequences

    where a_i = min(prefill seconds of the request there, floor_i). Q, N and W are summed over the replicas that may
    take the request. floor_i is one prefill chunk at that replica's speed or, if longer, the seconds that its cached
    tokens save this request there: to wait that long is no worse than to compute them elsewhere, and makes no copy.
    With the chunk alone, 16 requests at once with a new prefix of 3,000 tokens left 4 copies on 8 replicas; so they
    leave 3, which is what the bound on sequences asks for, with the same mean wait. And the second request to spill
    from a hot document would not follow the first, whose prefill it shares.

    The request being placed counts on both sides; its prefill counts with no more than the floor, since a prompt longer
    than that would fit nowhere on an idle fleet. For two replicas or more this implies the same law for the loads found
    before the request: load <= (1 + eps) x mean + floor. An idle fleet is always within bounds.
    """

    def __init__(self, views: Sequence[ReplicaView], settings: PlacementSettings) -> None:
        self._slack = (1 + settings.eps) / (sum(view.weight * view.warmth for view in views) or 1.0)
        self._chunk = settings.prefill_chunk_tokens
        self._floor_sequences = settings.floor_sequences
        self._prefill_s = sum(view.queue_s for view in views)
        self._running = sum(view.running for view in views)

    def within(self, view: ReplicaView, prefill_s: float, cached_tokens: int = 0) -> bool:
        """Whether a request may go to `view`: `prefill_s` seconds of uncached prefill there, `cached_tokens` saved."""
        share = self._slack * view.weight * view.warmth
        if view.running + 1 > share * (self._running + 1) + self._floor_sequences:
            return False
        floor = max(self._chunk / view.prefill_tokens_per_s, view.prefill_s(cached_tokens, 0))
        own = min(prefill_s, floor)
        # A replica exactly at its bound is within it, whatever the last bit of the division says.
        return view.queue_s + own <= (share * (self._prefill_s + own) + floor) * (1 + 1e-9)

    def pressure(self, view: ReplicaView) -> float:
        """The larger of its two loads as a share of its bound: who serves when all are over it."""
        share = self._slack * view.weight * view.warmth
        return max(
            view.running / (share * self._running + self._floor_sequences),
            view.queue_s / (share * self._prefill_s + self._chunk / view.prefill_tokens_per_s),
        )

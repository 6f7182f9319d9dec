"""The fleet that a workload is replayed on, and what its gateways may know."""

from __future__ import annotations

import msgspec

from gateway.placement.settings import PlacementSettings
from gateway.replay.physics import Physics
from kvstore.cost import LinkEstimate

ANNOUNCE_S = 0.01
"""Gateways know of each other's placements after this long, through the agents."""

FETCH_LATENCY_S = 0.002
"""What a fetch between replicas costs before its first byte."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of equal replicas. With `utilization` times are scaled so that prefilling every prompt whole would take
    that share of all replicas' time (0: times as recorded). `link` is what replicas read from each other's caches by,
    None where they cannot; one that `keeps_copies` does not evict first what a peer has read from it.

    What a gateway knows is `report_delay_s` old, but for what it placed since. Its estimate of a prefill is the true
    time x b_r x f_i, both lognormal(`estimate_error`): b_r belongs to a replica, f_i to a request. That replicas are
    `alike` is known to those who care; else they find out.
    """

    physics: Physics
    replicas: int = 8
    cache_tokens: int = 1_000_000
    utilization: float = 0.5
    seed: int = 0
    gateways: int = 1
    report_delay_s: float = 0.0
    estimate_error: float = 0.0
    link: LinkEstimate | None = None
    keeps_copies: bool = False
    alike: bool = True
    placement: PlacementSettings = PlacementSettings()

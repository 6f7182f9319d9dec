"""The constants of placement, in one frozen object."""

from __future__ import annotations

import msgspec

from gateway.errors import SettingsError


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of placement. What other values do on recorded traffic says `benchmarks/README.md`, "Constants of
    placement"; why they are as they are, the places named here.

    Raises SettingsError, naming the key, for a value that makes no sense.
    """

    eps: float = 1.0
    """How far above the mean a load may be before requests go elsewhere: load <= (1 + eps) x mean + floor."""
    prefill_chunk_tokens: int = 512
    """One prefill step of the engines: the floor of the prefill bound, and the largest remainder that is not worth
    a home of its own."""
    floor_sequences: float = 2.0
    """The floor of the bound on running sequences."""
    band_tokens: int = 128
    """Costs that differ by less than the prefill of this many tokens count as equal; see `placer`."""
    prefill_weight: float = 1.5
    """Price of a second of prefill against a second in the queue; see `cost`."""
    eviction_weight: float = 2.0
    """Price of a second of prefill that an eviction is expected to cost later, against one in the queue; see `cost`."""
    virtual_nodes: int = 512
    """Points on the ring per unit of weight; see `ring`."""
    window_requests: int = 1024
    """Recent requests over which a prefix's share of the traffic is counted; see `adaptive_key`."""
    share_bound: float = 0.5
    """A ring key may carry this share of one replica's mean traffic; see `adaptive_key`."""
    share_prior: float = 8.0
    """Requests a replica is assumed to have had before any were counted; see `adaptive_key`."""
    pending_ttl_s: float = 60.0
    """A placed prefix that is neither reported nor released is forgotten after this long."""
    report_grace_s: float = 2.0
    """The report of an answered request's blocks may be this late; as long as a silent stream is believed."""
    learned_ttl_s: float = 600.0
    """What was placed on a replica without reports is believed to be held for this long."""
    learned_units: int = 16_384
    """Units believed to be held on a replica without reports whose capacity is unknown (262,144 tokens)."""
    fetch: bool = True
    """Whether a replica may be told to read from a peer what it lacks."""
    fetch_margin: float = 0.1
    """A fetch must beat recomputing by this share of it; see `kvstore.cost.decide`."""
    fetch_least_deadline_s: float = 0.05
    """A fetch may take as long as recomputing what it brings, and this long in any case."""
    fetch_max_deadline_s: float = 30.0
    """A fetch may take no longer than this."""

    def __post_init__(self) -> None:
        for key in ("eps", "share_bound", "pending_ttl_s", "report_grace_s", "learned_ttl_s"):
            _require(key, getattr(self, key), getattr(self, key) > 0, "above 0")
        for key in ("prefill_chunk_tokens", "virtual_nodes", "window_requests", "learned_units", "floor_sequences"):
            _require(key, getattr(self, key), getattr(self, key) >= 1, "at least 1")
        for key in ("band_tokens", "prefill_weight", "eviction_weight", "share_prior"):
            _require(key, getattr(self, key), getattr(self, key) >= 0, "at least 0")
        _require("fetch_margin", self.fetch_margin, 0 <= self.fetch_margin < 1, "in [0, 1)")
        for key in ("fetch_least_deadline_s", "fetch_max_deadline_s"):
            _require(key, getattr(self, key), getattr(self, key) > 0, "above 0")


def _require(key: str, value: object, holds: bool, accepted: str) -> None:
    if not holds:
        raise SettingsError(f"placement.{key}: {value!r} is not accepted; it must be {accepted}")

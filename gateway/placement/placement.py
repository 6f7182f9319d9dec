"""What placement is asked and what it answers."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvstore.identity import UNIT_TOKENS
from kvstore.messages import FetchState


class Reason(StrEnum):
    """Why a replica was chosen; a bounded set, fit for a metric label."""

    HOME = "home"
    """First on the ring for the request's key, and no replica holds more."""
    LONGEST = "longest"
    """Not first on the ring, but it holds the longest prefix."""
    COST = "cost"
    """Another replica holds more, but this one answers sooner."""
    SPILL = "spill"
    """The best replica is at its bound; this is the next one that is not."""
    COLD = "cold"
    """No replica holds any of the prompt."""
    RETRY = "retry"
    """An earlier choice failed before it answered."""
    PINNED = "pinned"
    """The caller named the replica."""
    FALLBACK = "fallback"
    """Chosen by the ring alone: what this replica holds is not known."""


class Claims(StrEnum):
    """Where the knowledge of what a replica holds comes from."""

    REPORTS = "reports"
    """Its agent's live report stream."""
    LEARNED = "learned"
    """Only this gateway's own recent placements: no agent, stream lost, or keys that reports do not use."""
    NONE = "none"
    """Nothing: hash mode."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """What the placer is told about one replica for one decision. All loads include every request not yet finished.

    `queued_prefill_tokens` are uncached prompt tokens placed there whose first token has not been seen, deep ones
    counted as `effort` does; `running` counts sequences; `prefill_tokens_per_s` is the fitted speed at a prompt's
    beginning, `attention` how much longer a token takes for each one before it, as a share of the first one's, and
    `decode_share` the share of time that decoding takes from prefills. `block_units` is the engine block in RouteKey
    units of `unit_tokens` (other units than the wire's are for a replay, whose traces know larger ones only);
    `capacity_blocks` the engine's pool (0 unknown); `held_blocks` of them hold cached content. `block_bytes` (0
    unknown) and `fetch` say what moving blocks costs; `fetch` is None without a pool, or without reports. One that
    `yields` evicts first what a peer has read from it, but for what is hot: the peer goes on with the conversation.
    What it reports to hold is multiplied by `trust`. In the bounds its weight is multiplied by `warmth`.
    """

    id: str
    claims: Claims
    weight: float = 1.0
    warmth: float = 1.0
    queued_prefill_tokens: int = 0
    running: int = 0
    prefill_tokens_per_s: float
    attention: float = 0.0
    decode_share: float = 0.0
    block_units: int = 1
    unit_tokens: int = UNIT_TOKENS
    capacity_blocks: int = 0
    held_blocks: int = 0
    block_bytes: int = 0
    fetch: FetchState | None = None
    yields: bool = False
    trust: float = 1.0

    @property
    def block_tokens(self) -> int:
        """Tokens in an engine block."""
        return self.block_units * self.unit_tokens

    @property
    def queue_s(self) -> float:
        """Seconds of computing what is queued, while what decodes there goes on."""
        return self.queued_prefill_tokens / self.prefill_tokens_per_s / (1 - self.decode_share)

    def prefill_s(self, new: int, past: int) -> float:
        """Seconds of computing `new` tokens after `past` ones, while what decodes there goes on."""
        return effort(new, past, self.attention) / self.prefill_tokens_per_s / (1 - self.decode_share)


def effort(new: int, past: int, attention: float) -> float:
    """Tokens at a prompt's beginning that take as long as `new` ones after `past`; `attention` as in `ReplicaView`."""
    return new * (1 + attention * (past + new / 2))


class FetchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """KV that a replica should read from a peer's pool before it computes.

    `source` holds the first `blocks` engine blocks of the prompt; `tokens` of them, `bytes` in all, are not reported
    where the request goes, and reading them is expected to take `seconds`. What has not come after `deadline_s` is
    recomputed. `counted` is False where nothing is expected of it: the replica's agent only keeps records, or requests
    on their way are believed to bring the same blocks.
    """

    source: str
    blocks: int
    tokens: int
    bytes: int
    seconds: float
    deadline_s: float
    counted: bool


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's terms in one decision, for `/admin/explain`. Seconds unless the name says otherwise.

    `reported_tokens` are in its HBM by its own reports, whose worth is `trust`; `cached_tokens` are believed to need no
    computing; `pool_tokens` of them are in the pool of its own agent and not in its HBM. The `fetch_*` fields are those
    of its `FetchPlan`, "" and 0 without one.
    """

    replica: str
    ring_position: int
    claims: Claims
    reported_tokens: int
    trust: float
    cached_tokens: int
    pool_tokens: int
    fetch_source: str
    fetch_tokens: int
    fetch_s: float
    queue_s: float
    prefill_s: float
    eviction_s: float
    cost_s: float
    within_bound: bool


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The decision. `ring` lists all replicas in this key's ring order, home first; `home` is the replica that would
    have been chosen without the bounds. `predicted_cached_tokens` includes `predicted_pool_tokens`, which come out of
    the pool of the replica's own agent, and what `fetch` brings, where that is counted on; `reported_tokens` are those
    of the replica's own reports for its HBM, before they are multiplied by `trust`. The prompt begins with a prefix of
    `hot_units` that is too popular for one home."""

    replica: str
    reason: Reason
    home: str
    ring: list[str]
    predicted_cached_tokens: int
    predicted_pool_tokens: int = 0
    reported_tokens: int = 0
    trust: float = 1.0
    predicted_ttft_s: float
    fetch: FetchPlan | None = None
    hot_units: int = 0
    candidates: list[Candidate]

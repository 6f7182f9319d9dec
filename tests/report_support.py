"""What an agent says on a report stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.identity import pack_keys
from kvstore.messages import Heartbeat, Removed, Stored, Tier, digest_of


def stored(*keys: int, tier: Tier = Tier.HBM) -> Stored:
    return Stored(tier=tier, keys=pack_keys(keys), parents=bytes(8 * len(keys)))


def removed(*keys: int, tier: Tier = Tier.HBM) -> Removed:
    return Removed(tier=tier, keys=pack_keys(keys))


def beat(epoch: int, seq: int, *held: tuple[Tier, Iterable[int]], **fields: Any) -> Heartbeat:
    """Of an idle engine that is up, whose agent holds these keys."""
    sets = [(tier, set(keys)) for tier, keys in held]
    plain: dict[str, Any] = {
        "epoch": epoch,
        "seq": seq,
        "engine_up": True,
        "running": 0,
        "waiting": 0,
        "queued_prefill_tokens": None,
        "prefill_tokens_per_s": None,
        "kv_usage": 0.0,
        "capacity_blocks": 100,
        "blocks": sum(len(keys) for _, keys in sets),
        "digest": sum(digest_of(keys, tier) for tier, keys in sets) % 2**64,
    }
    return Heartbeat(**plain | fields)

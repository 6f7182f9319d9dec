"""vLLM's KV event wire format (0.32): event maps in an array-shaped batch, msgpack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class BlockStored(msgspec.Struct, tag=True, kw_only=True):
    """A run of consecutive blocks of one sequence became reusable.

    Hashes are the wire form of block hashes, `token_ids` is flat (len(block_hashes) * block_size), `extra_keys` has one
    entry for each block: None, or what the block's hash holds beside its tokens.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None]
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, tag=True, kw_only=True):
    """One copy of each of these blocks was evicted; other copies of the same hash may remain."""

    block_hashes: list[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is reusable any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one engine step, to be applied in order; `ts` is seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0

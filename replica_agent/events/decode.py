"""One internal form for every encoding of KV events in the field.

A batch is a msgpack array `[ts, events, data-parallel rank]`. An event is a map tagged `"type"` (vLLM from 0.24) or an
array with the tag first (vLLM before it, SGLang). Array positions (vLLM/distributed/kv_events.py, Dynamo's zmq_wire):

    BlockStored   1 hashes  2 parent  3 token_ids  4 block_size  5 lora_id  6 medium  7 lora_name  8 extra_keys
                  then [mm_infos] group_idx  kv_cache_spec_kind  sliding_window, as far as the version has them
    BlockRemoved  1 hashes  2 medium  3 group_idx
    AllBlocksCleared

SGLang stops after `medium`, or appends a map with the `cache_salt`. Hashes are integers or bytes and are kept as they
are. Unknown fields, event types and media are ignored and counted; what lacks a field it needs is an EventDecodeError.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from kvstore.errors import IdentityError
from kvstore.identity import pack_tokens
from kvstore.messages import Tier
from replica_agent.errors import EventDecodeError

EngineHash: TypeAlias = int | bytes

MAX_HASH_BYTES = 64
MAX_BLOCK_TOKENS = 65_536

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks, each the child of the one before it; the first is the child of `parent` (None: of the root).

    `tokens` is packed u32, `block_size` per hash, or empty when the event only says where known blocks are (vLLM's
    offloading). `extra` has an entry per block: what besides tokens went into its hash; None when the event has none.
    `lora` is None without an adapter and "" for one without a name. `full` is True when the event says that its group
    is one of full attention; other kinds of group never become an event.
    """

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: bytes
    block_size: int
    tier: Tier
    lora: str | None = None
    salt: str = ""
    extra: list[list[Any]] | None = None
    group: int = 0
    full: bool = False


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of each of these blocks is gone from `tier`."""

    hashes: list[EngineHash]
    tier: Tier
    group: int = 0


class AllCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything is gone from `tier`; None: from all of them."""

    tier: Tier | None = None


Event: TypeAlias = BlockStored | BlockRemoved | AllCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one message said, in order.

    `rank` is None where the engine does not tell; `ignored` counts events of unknown types, media and attention kinds,
    and those of no blocks.
    """

    timestamp: float
    rank: int | None
    events: list[Event]
    ignored: int = 0


_decoder = msgspec.msgpack.Decoder()


def decode_batch(payload: bytes) -> EventBatch:
    """A batch from its msgpack payload. Raises EventDecodeError; nothing of such a batch may be applied."""
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventDecodeError(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventDecodeError("a batch must be an array [ts, events, rank]")
    timestamp, rank = batch[0], batch[2] if len(batch) > 2 else None
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise EventDecodeError(f"ts: expected a number, got {timestamp!r:.80}")
    if rank is not None and type(rank) is not int:
        raise EventDecodeError(f"data_parallel_rank: expected an integer, got {rank!r:.80}")
    events: list[Event] = []
    for raw in batch[1]:
        event = _event(raw)
        if event is not None:
            events.append(event)
    return EventBatch(timestamp=float(timestamp), rank=rank, events=events, ignored=len(batch[1]) - len(events))


def _event(raw: object) -> Event | None:
    if isinstance(raw, dict):
        fields = raw
        tag = raw.get("type")
    elif isinstance(raw, list) and raw:
        tag = raw[0]
        fields = _name_positions(tag, raw)
    else:
        raise EventDecodeError(f"an event must be a map or an array with its tag, got {raw!r:.80}")
    if not isinstance(tag, str):
        raise EventDecodeError(f"an event's tag must be a string, got {tag!r:.80}")
    if tag.startswith("BlockStored"):
        return _stored(fields)
    if tag == "BlockRemoved":
        return _removed(fields)
    if tag == "AllBlocksCleared":
        medium = fields.get("medium")
        tier = _tier(medium)
        return None if medium is not None and tier is None else AllCleared(tier=tier if medium is not None else None)
    return None


_STORED_POSITIONS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def _name_positions(tag: object, raw: list[Any]) -> dict[Any, Any]:
    if tag == "BlockRemoved":
        return dict(zip(("block_hashes", "medium", "group_idx"), raw[1:], strict=False))
    if not isinstance(tag, str) or not tag.startswith("BlockStored"):
        return {}
    fields: dict[Any, Any] = {}
    rest: list[Any] = []
    for position, value in enumerate(raw[1:]):
        if isinstance(value, dict):
            fields["metadata"] = value
        elif position < len(_STORED_POSITIONS):
            fields[_STORED_POSITIONS[position]] = value
        else:
            rest.append(value)
    if rest:
        fields["extra_keys"] = rest[0]
    # What follows differs by version (mm_infos came and went): the kind is the landmark, the only string; before it the
    # group.
    tail = rest[1:]
    kinds = [index for index, value in enumerate(tail) if isinstance(value, str)]
    if kinds:
        fields["kv_cache_spec_kind"] = tail[kinds[0]]
        fields["group_idx"] = tail[kinds[0] - 1] if kinds[0] else None
    else:
        fields["group_idx"] = next((value for value in tail if type(value) is int), None)
    return fields


def _stored(fields: dict[Any, Any]) -> BlockStored | None:
    tier = _tier(fields.get("medium"))
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not isinstance(kind, str):
        raise EventDecodeError(f"kv_cache_spec_kind: expected a string, got {kind!r:.80}")
    if tier is None or _elsewhere(fields) or (kind is not None and kind not in FULL_ATTENTION_KINDS):
        return None
    hashes = _hashes(fields)
    if not hashes:
        return None
    parent = fields.get("parent_block_hash")
    if parent is not None and type(parent) not in (int, bytes):
        raise EventDecodeError(f"parent_block_hash: expected an integer or bytes, got {parent!r:.80}")
    block_size = fields.get("block_size")
    if type(block_size) is not int or not 0 < block_size <= MAX_BLOCK_TOKENS:
        raise EventDecodeError(f"block_size: expected 1 to {MAX_BLOCK_TOKENS}, got {block_size!r:.80}")
    tokens = _tokens(fields.get("token_ids"))
    if tokens and len(tokens) != 4 * block_size * len(hashes):
        raise EventDecodeError(f"token_ids: {len(tokens) // 4} tokens for {len(hashes)} blocks of {block_size}")
    return BlockStored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=block_size,
        tier=tier,
        lora=_lora(fields),
        salt=_salt(fields),
        extra=_extra(fields.get("extra_keys"), len(hashes)),
        group=_group(fields),
        full=kind is not None,
    )


def _removed(fields: dict[Any, Any]) -> BlockRemoved | None:
    tier = _tier(fields.get("medium"))
    hashes = _hashes(fields)
    return None if tier is None or _elsewhere(fields) else BlockRemoved(hashes=hashes, tier=tier, group=_group(fields))


def _tier(medium: object) -> Tier | None:
    if medium is None or medium == "GPU":
        return Tier.HBM
    if not isinstance(medium, str):
        raise EventDecodeError(f"medium: expected a string, got {medium!r:.80}")
    return Tier.DRAM if medium.startswith("CPU") else None


def _elsewhere(fields: dict[Any, Any]) -> bool:
    """Whether the blocks are in another host's memory: another replica's business, or nobody's."""
    return fields.get("locality") == "REMOTE"


def _hashes(fields: dict[Any, Any]) -> list[EngineHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not {type(item) for item in hashes} <= {int, bytes}:
        raise EventDecodeError(f"block_hashes: expected a list of integers or bytes, got {hashes!r:.80}")
    if any(type(item) is bytes and len(item) > MAX_HASH_BYTES for item in hashes):
        raise EventDecodeError(f"block_hashes: a hash has at most {MAX_HASH_BYTES} bytes")
    return hashes


def _tokens(raw: object) -> bytes:
    if raw is None:
        return b""
    if not isinstance(raw, list):
        raise EventDecodeError(f"token_ids: expected a list, got {raw!r:.80}")
    if raw and isinstance(raw[0], list):
        # EAGLE's bigrams: block i holds the KV of the first of each pair; the second is the token after it.
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in raw):
            raise EventDecodeError("token_ids: bigrams must be pairs")
        raw = [pair[0] for pair in raw]
    try:
        return pack_tokens(raw)
    except IdentityError as error:
        raise EventDecodeError(f"token_ids: {error}") from error


def _lora(fields: dict[Any, Any]) -> str | None:
    name = fields.get("lora_name")
    if isinstance(name, str) and name:
        return name
    return None if fields.get("lora_id") is None and name is None else ""


def _salt(fields: dict[Any, Any]) -> str:
    metadata = fields.get("metadata")
    salt = fields.get("cache_salt") or (metadata.get("cache_salt") if isinstance(metadata, dict) else None)
    return salt if isinstance(salt, str) else ""


def _extra(raw: object, blocks: int) -> list[list[Any]] | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != blocks:
        raise EventDecodeError(f"extra_keys: expected an entry for each of {blocks} blocks, got {raw!r:.80}")
    return [[] if entry is None else entry if isinstance(entry, list) else [entry] for entry in raw]


def _group(fields: dict[Any, Any]) -> int:
    group = fields.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int:
        raise EventDecodeError(f"group_idx: expected an integer, got {group!r:.80}")
    return group

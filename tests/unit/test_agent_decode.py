"""Golden bytes of every encoding in the field, hand-encoded from the published schemas, and what must be refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.identity import pack_tokens
from kvstore.messages import Tier
from replica_agent.catalogue import Catalogue
from replica_agent.errors import EventDecodeError
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, decode_batch

TOKENS = list(range(16))
STORED = BlockStored(
    hashes=[7], parent=None, tokens=pack_tokens(TOKENS), block_size=16, tier=Tier.HBM, extra=[[]], full=True
)

# [1.5, [{"type": "BlockStored", "block_hashes": [7], "parent_block_hash": nil, "token_ids": [0..15], "block_size": 16,
#   "lora_id": nil, "medium": "GPU", "lora_name": nil, "extra_keys": [nil], "group_idx": 0,
#   "kv_cache_spec_kind": "full_attention"}], 0]
VLLM_MAP = bytes.fromhex(
    "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f696473dc0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f6964"
    "c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f6361636865"
    "5f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)
# [1.5, [["BlockStored", [7], nil, [0..15], 16, nil, "GPU", nil]], 0]
VLLM_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009198ab426c6f636b53746f7265649107c0dc0010000102030405060708090a0b0c0d0e0f10c0a3475055c000"
)
# [1.5, [["BlockStored", [-7], nil, [0..15], 16, nil], ["BlockRemoved", [-7]], ["AllBlocksCleared"]]]
SGLANG_ARRAY = bytes.fromhex(
    "92cb3ff80000000000009396ab426c6f636b53746f72656491f9c0dc0010000102030405060708090a0b0c0d0e0f10c092ac426c6f636b52"
    "656d6f76656491f991b0416c6c426c6f636b73436c6561726564"
)
# [1.5, [{"type": "BlockStored", "block_hashes": [-7, -2**63], "parent_block_hash": -3, "token_ids": [0..31],
#         "block_size": 16, "lora_id": nil, "medium": "GPU", "session_id": "s-1"},
#        {"type": "BlockRemoved", "block_hashes": [-3, -7], "medium": "CPU_PINNED"},
#        {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": nil, "token_ids": [0..15], "block_size": 16,
#         "lora_id": nil, "medium": "EXTERNAL"},
#        {"type": "AllBlocksCleared"}], 1]
SGLANG_MAP = bytes.fromhex(
    "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392f9d38000000000000000b17061"
    "72656e745f626c6f636b5f68617368fda9746f6b656e5f696473dc0020000102030405060708090a0b0c0d0e0f101112131415161718191a"
    "1b1c1d1e1faa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055aa73657373696f6e5f6964a3732d3183a47479"
    "7065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392fdf9a66d656469756daa4350555f50494e4e454487a474797065ab"
    "426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc"
    "0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da845585445524e414c81"
    "a474797065b0416c6c426c6f636b73436c656172656401"
)


def batch(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored_array(*more: object) -> list[object]:
    return ["BlockStored", [7], None, TOKENS, 16, *more]


def test_vllm_map_golden_bytes() -> None:
    decoded = decode_batch(VLLM_MAP)
    assert (decoded.timestamp, decoded.rank, decoded.ignored) == (1.5, 0, 0)
    assert decoded.events == [STORED]


def test_vllm_array_golden_bytes() -> None:
    assert decode_batch(VLLM_ARRAY).events == [msgspec.structs.replace(STORED, extra=None, full=False)]


def test_sglang_array_golden_bytes() -> None:
    decoded = decode_batch(SGLANG_ARRAY)
    assert decoded.rank is None
    assert decoded.events == [
        msgspec.structs.replace(STORED, hashes=[-7], extra=None, full=False),
        BlockRemoved(hashes=[-7], tier=Tier.HBM),
        AllCleared(),
    ]


def test_sglang_map_golden_bytes() -> None:
    decoded = decode_batch(SGLANG_MAP)
    assert (decoded.rank, decoded.ignored) == (1, 1), "a pool that replicas share is nobody's cache"
    assert decoded.events == [
        BlockStored(hashes=[-7, -(2**63)], parent=-3, tokens=pack_tokens(range(32)), block_size=16, tier=Tier.HBM),
        BlockRemoved(hashes=[-3, -7], tier=Tier.DRAM),
        AllCleared(),
    ]


def test_what_sglang_says_beside_is_read_or_left() -> None:
    """Salt and adapter change what a block is; sessions, and hashes of other chains, do not."""
    plain = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": TOKENS}
    plain |= {"block_size": 16, "lora_id": None, "medium": "GPU"}
    chains = {"namespaced_block_hashes": [8], "namespaced_parent_block_hash": -9}
    bigrams = {"token_ids": [[token, token + 1] for token in TOKENS]}
    expected = msgspec.structs.replace(STORED, extra=None, full=False)
    for more, changed in (
        (chains | {"session_id": "s"}, {}),
        (bigrams, {}),
        ({"cache_salt": "tenant"}, {"salt": "tenant"}),
        ({"lora_name": "adapter", "session_id": "s"}, {"lora": "adapter"}),
    ):
        assert decode_batch(batch(plain | more)).events == [msgspec.structs.replace(expected, **changed)]
    for metadata in ({"cache_salt": "tenant"}, {"cache_salt": "tenant", "session_id": "s"}):
        (event,) = decode_batch(batch(stored_array(None, "GPU", metadata))).events
        assert event == msgspec.structs.replace(expected, salt="tenant"), "as it was said for a while"


@pytest.mark.parametrize(
    "tail",
    [
        (None, "GPU", None, [None], 0, "full_attention", None),
        (None, "GPU", None, [None], None, 0, "full_attention", None),
        (None, "GPU", None, [None], [{"mm": 1}], 0, "full_attention", None),
        (None, "GPU", None, [None], 0, "mla_attention"),
        (None, "GPU", None, [None], 0, "sink_full_attention", None, "from the future", 9),
    ],
)
def test_every_tail_of_the_array_form_is_found_by_its_kind(tail: tuple[object, ...]) -> None:
    assert decode_batch(batch(stored_array(*tail))).events == [STORED]


def test_group_without_a_kind_is_the_first_number_of_the_tail() -> None:
    (event,) = decode_batch(batch(stored_array(None, "GPU", None, [None], 3))).events
    assert isinstance(event, BlockStored)
    assert (event.group, event.full) == (3, False)


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "of the future"])
def test_other_kinds_of_group_are_no_events(kind: str) -> None:
    as_map = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [], "block_size": 1}
    as_map |= {"group_idx": 1, "kv_cache_spec_kind": kind}
    decoded = decode_batch(batch(as_map, stored_array(None, "GPU", None, [None], 1, kind, 128)))
    assert (decoded.events, decoded.ignored) == ([], 2)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, Tier.HBM), ("GPU", Tier.HBM), ("CPU", Tier.DRAM), ("CPU_PINNED", Tier.DRAM), ("CPU_TIER1", Tier.DRAM)],
)
def test_media(medium: str | None, tier: Tier) -> None:
    (event,) = decode_batch(batch({"type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": medium})).events
    assert event == BlockRemoved(hashes=[b"x" * 32], tier=tier)


def test_what_another_host_holds_is_left() -> None:
    stored = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": TOKENS}
    stored |= {"block_size": 16, "medium": "CPU"}
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    decoded = decode_batch(batch(*(each | {"locality": "REMOTE"} for each in (stored, removed))))
    assert (decoded.events, decoded.ignored) == ([], 2)
    decoded = decode_batch(batch(*(each | {"locality": "LOCAL"} for each in (stored, removed))))
    assert (len(decoded.events), decoded.ignored) == (2, 0)


def test_unknown_media_and_types_are_counted() -> None:
    decoded = decode_batch(
        batch(
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE"},
            {"type": "SomethingNew", "block_hashes": 5},
            ["SomethingElse", 1, 2],
            {"type": "AllBlocksCleared", "new_field": 1},
        )
    )
    assert (decoded.events, decoded.ignored) == ([AllCleared()], 3)


def test_bigram_tokens_name_the_first_of_each_pair() -> None:
    bigrams = [[token, token + 1] for token in TOKENS]
    (event,) = decode_batch(batch(["BlockStored", [7], None, bigrams, 16, None])).events
    assert isinstance(event, BlockStored)
    assert event.tokens == pack_tokens(TOKENS)


def test_a_salt_in_metadata_is_read_in_both_forms() -> None:
    as_map = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": TOKENS}
    as_map |= {"block_size": 16, "metadata": {"cache_salt": "s"}}
    for event in decode_batch(batch(as_map, stored_array(None, "GPU", {"cache_salt": "s"}))).events:
        assert isinstance(event, BlockStored)
        assert (event.salt, event.lora) == ("s", None)


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    named, unnamed = decode_batch(
        batch(stored_array(1, "GPU", "adapter"), stored_array(1, "GPU")),
    ).events
    assert isinstance(named, BlockStored)
    assert isinstance(unnamed, BlockStored)
    assert (named.lora, unnamed.lora) == ("adapter", "")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01" + b"\x91" * 5_000,
        b"\x92\x01\x91\x81\x90\x01",
        VLLM_MAP[:-3],
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["now", []]),
        batch(rank="0"),
        batch(5),
        batch([]),
        batch({"block_hashes": [1]}),
        batch({"type": "BlockRemoved"}),
        batch({"type": "BlockRemoved", "block_hashes": ["x"]}),
        batch({"type": "BlockRemoved", "block_hashes": [True]}),
        batch({"type": "BlockRemoved", "block_hashes": [1], "medium": 3}),
        batch({"type": "BlockRemoved", "block_hashes": [1], "group_idx": "a"}),
        batch(["BlockStored", [7], None, TOKENS]),
        batch(["BlockStored", [7], None, TOKENS, 0, None]),
        batch(["BlockStored", [7], 1.5, TOKENS, 16, None]),
        batch(["BlockStored", [7], None, TOKENS, 65_537, None]),
        batch({"type": "BlockRemoved", "block_hashes": [bytes(65)]}),
        batch(["BlockStored", [7], None, TOKENS[:-1], 16, None]),
        batch(["BlockStored", [7], None, [-1] * 16, 16, None]),
        batch(["BlockStored", [7], None, [[1]] * 16, 16, None]),
        batch(stored_array(None, "GPU", None, [None, None])),
        batch({"type": "BlockStored", "block_hashes": [7], "block_size": 16, "kv_cache_spec_kind": ["full_attention"]}),
        batch({"type": "BlockStored", "block_hashes": [7], "block_size": 16, "kv_cache_spec_kind": {}}),
    ],
)
def test_what_cannot_be_read_is_one_error(payload: bytes) -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(payload)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=12,
)
NAMES = [
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "extra_keys", "group_idx"),
    *("kv_cache_spec_kind", "lora_id", "lora_name", "cache_salt", "metadata", "locality"),
]
fields = st.sampled_from(NAMES)
hashes = st.integers(-3, 3) | st.binary(max_size=2)
blocks = st.integers(0, 3).flatmap(
    lambda count: st.fixed_dictionaries(
        {
            "type": st.just("BlockStored"),
            "block_hashes": st.lists(hashes, min_size=count, max_size=count),
            "parent_block_hash": st.none() | hashes,
            "token_ids": st.just([]) | st.lists(st.integers(0, 9), min_size=16 * count, max_size=16 * count),
            "block_size": st.just(16),
        },
        optional={
            "medium": st.sampled_from(["GPU", "CPU"]),
            "extra_keys": st.lists(json_like, min_size=count, max_size=count),
            "group_idx": st.integers(0, 1),
            "lora_name": st.none() | st.text(),
            "cache_salt": json_like,
        },
    )
)
removals = st.fixed_dictionaries(
    {"type": st.just("BlockRemoved"), "block_hashes": st.lists(hashes)}, optional={"medium": st.just("CPU")}
)
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])


@given(
    st.binary()
    | json_like.map(msgspec.msgpack.encode)
    | st.lists(st.dictionaries(fields, json_like) | st.builds(lambda t, r: [t, *r], tags, st.lists(json_like))).map(
        lambda events: batch(*events)
    )
    | st.builds(lambda tag, more: batch({"type": tag} | more), tags, st.dictionaries(fields, json_like))
)
def test_nothing_raises_anything_else(payload: bytes) -> None:
    try:
        events: list[Any] = decode_batch(payload).events
    except EventDecodeError:
        return
    assert all(isinstance(event, BlockStored | BlockRemoved | AllCleared) for event in events)
    catalogue = Catalogue("m", 7)
    catalogue.apply(events)
    catalogue.check()


@given(st.lists(st.lists(blocks | removals | st.just(["AllBlocksCleared"])), max_size=4))
def test_what_can_be_read_can_be_taken_in(batches: list[list[object]]) -> None:
    catalogue = Catalogue("m", 7)
    for events in batches:
        catalogue.apply(decode_batch(batch(*events)).events)
        catalogue.check()


def test_a_run_of_no_blocks_says_nothing() -> None:
    nothing = {"type": "BlockStored", "block_hashes": [], "parent_block_hash": None, "block_size": 16}
    decoded = decode_batch(batch(nothing, stored_array(None, "GPU")))
    assert (len(decoded.events), decoded.ignored) == (1, 1)

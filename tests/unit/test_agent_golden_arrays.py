"""Golden bytes of salted SGLang events, and of vLLM's arrays with all that they had behind the name of the adapter.

Encoded by hand from the schemas, byte by byte, not by the library that decodes them; those without a salt or a tail are
in test_agent_decode.py, vLLM's maps in test_agent_golden_events.py.
"""

from __future__ import annotations

import msgspec
from agent_support import SEED

from kvstore.identity import Namespace, pack_tokens, token_keys
from kvstore.messages import Tier
from replica_agent.catalogue import Catalogue
from replica_agent.events.decode import AllCleared, BlockRemoved, BlockStored, decode_batch

TOKENS = list(range(16))
ROOT = -(2**63) + 5
"""A hash as SGLang has them: 64 bits, signed."""

STORED = BlockStored(hashes=[7], parent=None, tokens=pack_tokens(TOKENS), block_size=16, tier=Tier.HBM)

# SGLang with its pull request 30827 (2026-07): BlockStored is block_hashes, parent_block_hash, token_ids, block_size,
# lora_id, medium, and behind them a map {cache_salt}, only where there is a salt; a batch [ts, events, attn_dp_rank].
# [1.5, [["BlockStored", [-2**63 + 5], nil, [0..15], 16, nil, "GPU", {"cache_salt": "tenant"}],
#        ["BlockStored", [-8], -2**63 + 5, [0..15], 16, nil, "CPU_PINNED", {"cache_salt": "tenant"}],
#        ["BlockRemoved", [-2**63 + 5], "GPU"]], 0]
SGLANG_SALTED_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009398ab426c6f636b53746f72656491d38000000000000005c0dc0010000102030405060708090a0b0c0d0e0f10c0"
    "a347505581aa63616368655f73616c74a674656e616e7498ab426c6f636b53746f72656491f8d38000000000000005dc0010000102030405"
    "060708090a0b0c0d0e0f10c0aa4350555f50494e4e454481aa63616368655f73616c74a674656e616e7493ac426c6f636b52656d6f766564"
    "91d38000000000000005a347505500"
)
# SGLang since its events are tagged maps: the same fields by name, then cache_salt and session_id; those that are
# nil by default are left out. [1.5, [{"type": "BlockStored", "block_hashes": [-2**63 + 5], "parent_block_hash": nil,
#   "token_ids": [0..15], "block_size": 16, "lora_id": nil, "medium": "GPU", "cache_salt": "tenant"},
#  {"type": "BlockStored", "block_hashes": [-8], "parent_block_hash": -2**63 + 5, "token_ids": [0..15],
#   "block_size": 16, "lora_id": nil, "medium": "CPU_PINNED", "cache_salt": "tenant", "session_id": "s-1"}], 0]
SGLANG_SALTED_MAP = bytes.fromhex(
    "93cb3ff80000000000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391d38000000000000005b1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510"
    "a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74a674656e616e7489a474797065ab426c6f636b53746f726564"
    "ac626c6f636b5f68617368657391f8b1706172656e745f626c6f636b5f68617368d38000000000000005a9746f6b656e5f696473dc001000"
    "0102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756daa4350555f50494e4e4544aa63"
    "616368655f73616c74a674656e616e74aa73657373696f6e5f6964a3732d3100"
)
# vLLM before 0.24: BlockStored is block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name
# (0.16 stops there), then extra_keys, an entry for each block: adapter, and on the first block the salt.
# [1.5, [["BlockStored", [2**64 - 1, 7], nil, [0..15, 0..15], 16, 1, "GPU", "sql", [["sql", "tenant"], ["sql"]]]], 0]
VLLM_ARRAY_EXTRA = bytes.fromhex(
    "93cb3ff80000000000009199ab426c6f636b53746f72656492cfffffffffffffffff07c0dc0020000102030405060708090a0b0c0d0e0f00"
    "0102030405060708090a0b0c0d0e0f1001a3475055a373716c9292a373716ca674656e616e7491a373716c00"
)
# vLLM before 0.24, later ones: behind extra_keys group_idx, kv_cache_spec_kind and kv_cache_spec_sliding_window, as far
# as they are not nil; BlockRemoved is block_hashes, medium, group_idx.
# [1.5, [["BlockStored", [7], nil, [0..15], 16, nil, "GPU", nil, [["tenant"]], 2, "full_attention"],
#        ["BlockStored", [8], nil, [0..15], 16, nil, "GPU", nil, [["tenant"]], 1, "sliding_window", 128],
#        ["BlockRemoved", [7], "GPU", 2], ["AllBlocksCleared"]], 0]
VLLM_ARRAY_GROUPS = bytes.fromhex(
    "93cb3ff8000000000000949bab426c6f636b53746f7265649107c0dc0010000102030405060708090a0b0c0d0e0f10c0a3475055c09191a6"
    "74656e616e7402ae66756c6c5f617474656e74696f6e9cab426c6f636b53746f7265649108c0dc0010000102030405060708090a0b0c0d0e"
    "0f10c0a3475055c09191a674656e616e7401ae736c6964696e675f77696e646f77cc8094ac426c6f636b52656d6f7665649107a347505502"
    "91b0416c6c426c6f636b73436c656172656400"
)
# The same with mm_infos between extra_keys and group_idx, as Dynamo's reader of these arrays allows for; an image's key
# is its identifier and where it begins.
# [1.5, [["BlockStored", [7], nil, [0..15], 16, nil, "GPU", nil, [[["a1b2", 3]]], [nil], 2, "full_attention"]], 0]
VLLM_ARRAY_IMAGES = bytes.fromhex(
    "93cb3ff8000000000000919cab426c6f636b53746f7265649107c0dc0010000102030405060708090a0b0c0d0e0f10c0a3475055c0919192"
    "a4613162320391c002ae66756c6c5f617474656e74696f6e00"
)


def held(payload: bytes, tier: Tier = Tier.HBM) -> set[int]:
    """What a catalogue of model "m" holds once it has all of a batch."""
    subject = Catalogue("m", SEED)
    subject.apply(decode_batch(payload).events)
    subject.check()
    return set(subject.held(tier)[0])


def names(tokens: list[int], lora: str = "", salt: str = "") -> list[int]:
    return list(token_keys(Namespace("m", lora, salt).root(SEED), tokens))


def test_a_salted_array_of_sglang() -> None:
    batch = decode_batch(SGLANG_SALTED_ARRAY)
    assert (batch.timestamp, batch.rank, batch.ignored) == (1.5, 0, 0)
    first = msgspec.structs.replace(STORED, hashes=[ROOT], salt="tenant")
    assert batch.events == [
        first,
        msgspec.structs.replace(first, hashes=[-8], parent=ROOT, tier=Tier.DRAM),
        BlockRemoved(hashes=[ROOT], tier=Tier.HBM),
    ]
    assert held(SGLANG_SALTED_ARRAY) == set()
    assert held(SGLANG_SALTED_ARRAY, Tier.DRAM) == {names(TOKENS + TOKENS, salt="tenant")[1]}


def test_a_salted_map_of_sglang() -> None:
    batch = decode_batch(SGLANG_SALTED_MAP)
    assert (batch.timestamp, batch.rank, batch.ignored) == (1.5, 0, 0)
    first = msgspec.structs.replace(STORED, hashes=[ROOT], salt="tenant")
    assert batch.events == [first, msgspec.structs.replace(first, hashes=[-8], parent=ROOT, tier=Tier.DRAM)]
    assert held(SGLANG_SALTED_MAP) == {names(TOKENS, salt="tenant")[0]}
    assert held(SGLANG_SALTED_MAP, Tier.DRAM) == {names(TOKENS + TOKENS, salt="tenant")[1]}


def test_an_array_of_vllm_with_adapter_and_salt() -> None:
    batch = decode_batch(VLLM_ARRAY_EXTRA)
    assert (batch.timestamp, batch.rank, batch.ignored) == (1.5, 0, 0)
    tokens = pack_tokens(TOKENS + TOKENS)
    assert batch.events == [
        msgspec.structs.replace(
            STORED, hashes=[2**64 - 1, 7], tokens=tokens, lora="sql", extra=[["sql", "tenant"], ["sql"]]
        )
    ]
    assert held(VLLM_ARRAY_EXTRA) == set(names(TOKENS + TOKENS, lora="sql", salt="tenant"))


def test_arrays_of_vllm_with_groups() -> None:
    batch = decode_batch(VLLM_ARRAY_GROUPS)
    assert (batch.timestamp, batch.rank, batch.ignored) == (1.5, 0, 1), "a window is no prefix"
    assert batch.events == [
        msgspec.structs.replace(STORED, extra=[["tenant"]], group=2, full=True),
        BlockRemoved(hashes=[7], tier=Tier.HBM, group=2),
        AllCleared(),
    ]
    subject = Catalogue("m", SEED)
    subject.apply(batch.events[:1])
    assert list(subject.held(Tier.HBM)[0]) == names(TOKENS, salt="tenant")
    subject.apply(batch.events[1:2])
    subject.check()
    assert not subject.held(Tier.HBM)[0]


def test_an_array_of_vllm_with_images() -> None:
    batch = decode_batch(VLLM_ARRAY_IMAGES)
    assert batch.events == [msgspec.structs.replace(STORED, extra=[[["a1b2", 3]]], group=2, full=True)]
    assert held(VLLM_ARRAY_IMAGES) == set(), "no prompt's text names it"

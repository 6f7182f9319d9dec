"""Names of prefixes and blocks: fixed values, the chain law, and vLLM's own names."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import IdentityError, KvStoreError
from kvstore.identity import (
    ROOT_BLOCK_HASH,
    TEXT_UNIT_BYTES,
    UNIT_TOKENS,
    Namespace,
    chain,
    engine_block_hash,
    pack_keys,
    pack_tokens,
    text_keys,
    token_keys,
    unpack_keys,
    wire_block_hash,
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
roots = st.integers(0, 2**64 - 1)


def test_golden_values() -> None:
    """Agents and gateways of different versions must agree, so these numbers may never change."""
    root = Namespace("m").root(0)
    assert root == 0xA35B39F244C3BBEA
    assert Namespace("m").root(7) == 0xA13FE8482FC13BC2
    assert Namespace("m", "a").root(0) == 0x161012D04764C81
    assert Namespace("m", "", "s").root(0) == 0x3407411A8A089A4F
    assert list(token_keys(root, range(40))) == [0x9ACD54BF91E005D4, 0xAD6172411326A691]
    assert list(text_keys(root, bytes(range(256)) * 2 + b"x")) == [0x6B4CB8CC2D276BDD, 0x13024A31D70EA2E2]


@given(roots, tokens, tokens)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(root: int, head: list[int], tail: list[int]) -> None:
    longer = list(token_keys(root, head + tail))
    assert len(longer) == len(head + tail) // UNIT_TOKENS
    assert longer[: len(head) // UNIT_TOKENS] == list(token_keys(root, head))


@given(roots, tokens, st.data())
def test_a_changed_token_changes_every_key_from_its_unit_on(root: int, ids: list[int], data: st.DataObject) -> None:
    if len(ids) < UNIT_TOKENS:
        return
    at = data.draw(st.integers(0, len(ids) // UNIT_TOKENS * UNIT_TOKENS - 1))
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    before, after = list(token_keys(root, ids)), list(token_keys(root, changed))
    unit = at // UNIT_TOKENS
    assert before[:unit] == after[:unit]
    assert all(left != right for left, right in zip(before[unit:], after[unit:], strict=True))


def test_units_of_text_are_bytes() -> None:
    text = "ü".encode() * TEXT_UNIT_BYTES
    assert len(text_keys(1, text)) == 2
    assert len(text_keys(1, text[:-1])) == 1
    assert list(text_keys(1, text)) == list(chain(1, text, TEXT_UNIT_BYTES))
    assert not text_keys(1, b"x" * (TEXT_UNIT_BYTES - 1))
    assert not token_keys(1, range(UNIT_TOKENS - 1))


def test_a_chain_can_be_continued_from_any_of_its_keys() -> None:
    packed = pack_tokens(range(64))
    keys = chain(5, packed)
    assert list(chain(keys[1], memoryview(packed)[128:])) == list(keys[2:])


def test_namespaces_differ() -> None:
    """Also where the joined text of the fields would be the same."""
    namespaces = [
        Namespace("m"),
        Namespace("m", lora="x"),
        Namespace("m", salt="x"),
        Namespace("mx"),
        Namespace("m", lora="x", salt="y"),
        Namespace("m", lora="xy"),
        Namespace("", lora="m"),
        Namespace(""),
    ]
    assert len({namespace.root(0) for namespace in namespaces}) == len(namespaces)
    assert len({namespace.root(1) for namespace in namespaces} | {n.root(0) for n in namespaces}) == 2 * len(namespaces)
    assert Namespace("m").root(2**64 + 3) == Namespace("m").root(3)


@given(st.lists(roots))
def test_keys_survive_packing(keys: list[int]) -> None:
    packed = pack_keys(keys)
    assert packed == b"".join(key.to_bytes(8, "little") for key in keys)
    assert list(unpack_keys(packed)) == list(unpack_keys(memoryview(packed))) == keys


@given(tokens)
def test_tokens_are_little_endian(ids: list[int]) -> None:
    assert pack_tokens(ids) == b"".join(token.to_bytes(4, "little") for token in ids)


@pytest.mark.parametrize("bad", [[-1], [2**32], ["1"], [1.5], [None]])
def test_what_is_no_token_id_is_named(bad: list[object]) -> None:
    with pytest.raises(IdentityError, match="token ids must be integers"):
        pack_tokens(bad)  # type: ignore[arg-type]


def test_a_cut_key_is_an_error() -> None:
    with pytest.raises(IdentityError, match="multiple of 8 bytes, got 9"):
        unpack_keys(b"123456789")
    assert issubclass(IdentityError, KvStoreError)


def test_block_hashes_are_those_of_vllm() -> None:
    """vLLM hashes pickle((parent, tokens, extra keys)) with sha256; recomputed here, and as fixed values."""

    def vllm(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()

    root = vllm("vllm-none-hash")
    first = vllm((root, tuple(range(16)), None))
    salted = vllm((first, tuple(range(16, 32)), (("cache_salt", "s"),)))
    assert root == ROOT_BLOCK_HASH
    assert root.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    assert engine_block_hash(ROOT_BLOCK_HASH, range(16)) == first
    assert first.hex() == "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798"
    assert engine_block_hash(first, list(range(16, 32)), (("cache_salt", "s"),)) == salted
    assert salted.hex() == "5a0275df9a8b8a00bdb043b607cf47d1808256122df73284f6cc4ab88e6f62f0"
    assert wire_block_hash(first) == int(first.hex()[-16:], 16) == 3262291359910021016

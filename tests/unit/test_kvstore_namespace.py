"""Namespaces: whatever may change a block's bytes makes another one, and is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.namespace import CONTENT_KEY_BYTES, MAX_CONTENT_KEYS, KvNamespace, pack_content_keys, unpack_content_keys

BASE = KvNamespace(
    dtype="bfloat16",
    block_size=16,
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_bytes=368_640,
    hash_algorithm="sha256",
    identity={"model": "m", "weights": "w", "rope": "theta=1e5"},
)

OTHER_VALUES: dict[str, Any] = {
    "layout": "another",
    "dtype": "fp8_e5m2",
    "block_size": 32,
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 128,
    "block_bytes": 1,
    "hash_algorithm": "sha256_cbor",
    "identity": {"model": "m", "weights": "w", "rope": "theta=1e6"},
}


def test_every_field_is_tried() -> None:
    assert OTHER_VALUES.keys() == set(KvNamespace.__struct_fields__)


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_any_difference_is_another_namespace_and_named(field: str) -> None:
    other = msgspec.structs.replace(BASE, **{field: OTHER_VALUES[field]})
    assert other.digest != BASE.digest
    (told,) = BASE.differences(other)
    assert told.startswith("rope: 'theta=1e5' here, 'theta=1e6'" if field == "identity" else f"{field}: ")
    assert repr(getattr(BASE, field)) + " here" in told or field == "identity"


def test_equal_namespaces_have_one_digest_whatever_the_order() -> None:
    other = msgspec.structs.replace(BASE, identity=dict(reversed(BASE.identity.items())))
    assert (other.digest, BASE.differences(other)) == (BASE.digest, [])
    assert len(BASE.digest) == 32
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=KvNamespace)
    assert (sent, sent.digest) == (BASE, BASE.digest)


def test_all_differences_are_named_at_once() -> None:
    other = msgspec.structs.replace(BASE, layers=2, dtype="float16", identity={"model": "m", "quantization": "awq"})
    assert BASE.differences(other) == [
        "dtype: 'bfloat16' here, 'float16' there",
        "layers: 30 here, 2 there",
        "quantization: None here, 'awq' there",
        "rope: 'theta=1e5' here, None there",
        "weights: 'w' here, None there",
    ]


identities = st.dictionaries(st.sampled_from(["a", "b", "dtype"]), st.sampled_from(["", "a", "b", "bfloat16"]))


@given(identities, identities)
def test_digests_are_equal_only_for_equal_identities(one: dict[str, str], two: dict[str, str]) -> None:
    first, second = (msgspec.structs.replace(BASE, identity=identity) for identity in (one, two))
    assert (first.digest == second.digest) == (one == two) == (first.differences(second) == [])


@given(st.lists(st.binary(min_size=CONTENT_KEY_BYTES, max_size=CONTENT_KEY_BYTES), max_size=5))
def test_packed_keys_are_unpacked(keys: list[bytes]) -> None:
    packed = pack_content_keys(keys)
    assert len(packed) == CONTENT_KEY_BYTES * len(keys)
    assert unpack_content_keys(packed) == keys


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_another_length_are_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=f"has 32 bytes, got {length}"):
        pack_content_keys([bytes(32), bytes(length)])


@pytest.mark.parametrize("length", [1, 31, 33])
def test_a_packed_string_of_another_length_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 32 bytes, got {length}"):
        unpack_content_keys(bytes(length))


def test_more_keys_than_a_message_may_have_are_an_error() -> None:
    assert len(unpack_content_keys(bytes(CONTENT_KEY_BYTES * MAX_CONTENT_KEYS))) == MAX_CONTENT_KEYS
    with pytest.raises(ValueError, match="65537 of them; the limit is 65536"):
        unpack_content_keys(bytes(CONTENT_KEY_BYTES * (MAX_CONTENT_KEYS + 1)))

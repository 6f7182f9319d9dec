"""Trailers: whatever differs from what was sealed is told, by its kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import WrongBytes
from kvstore.slot import PAGE, TRAILER_BYTES, checksum, pitch_of, restamp, seal, verify

KEY = bytes(range(32))
BLOCK_BYTES = 5_000


@pytest.fixture
def slot() -> memoryview:
    """A sealed slot of generation 7."""
    slot = memoryview(bytearray(pitch_of(BLOCK_BYTES)))
    slot[:BLOCK_BYTES] = bytes(index * 37 % 251 for index in range(BLOCK_BYTES))
    seal(slot, BLOCK_BYTES, KEY, 7)
    return slot


def kind_of(slot: memoryview, key: bytes = KEY, generation: int = 7) -> str:
    with pytest.raises(WrongBytes) as raised:
        verify(slot, BLOCK_BYTES, key, generation)
    return raised.value.kind


@given(st.integers(1, 2**40))
def test_a_slot_holds_payload_and_trailer_in_whole_pages(block_bytes: int) -> None:
    pitch = pitch_of(block_bytes)
    assert pitch % PAGE == 0
    assert block_bytes + TRAILER_BYTES <= pitch < block_bytes + TRAILER_BYTES + PAGE


def test_what_was_sealed_verifies(slot: memoryview) -> None:
    assert verify(slot, BLOCK_BYTES, KEY, 7) == checksum(slot[:BLOCK_BYTES], KEY) == seal(slot, BLOCK_BYTES, KEY, 7)
    largest = 2**64 - 1
    seal(slot, BLOCK_BYTES, KEY, largest)
    assert verify(slot, BLOCK_BYTES, KEY, largest)


@pytest.mark.parametrize("bit", [0, 8 * 1_234 + 5, 8 * BLOCK_BYTES - 1])
def test_one_flipped_bit_is_told(slot: memoryview, bit: int) -> None:
    slot[bit // 8] ^= 1 << bit % 8
    assert kind_of(slot) == "checksum"


@pytest.mark.parametrize(
    ("at", "kind"), [(0, "trailer"), (8, "key"), (39, "key"), (40, "generation"), (48, "checksum")]
)
def test_a_damaged_trailer_is_told(slot: memoryview, at: int, kind: str) -> None:
    slot[len(slot) - TRAILER_BYTES + at] ^= 1
    assert kind_of(slot) == kind


def test_another_block_or_generation_is_told(slot: memoryview) -> None:
    assert kind_of(slot, key=bytes(32)) == "key"
    assert kind_of(slot, generation=8) == "generation"
    slot[:] = bytes(len(slot))
    assert kind_of(slot, key=bytes(32), generation=0) == "trailer"


def test_a_payload_under_another_blocks_trailer_does_not_verify(slot: memoryview) -> None:
    """The sender mixed up two blocks, and its checksums with them."""
    digest = checksum(slot[:BLOCK_BYTES], KEY)
    other = b"\x01" + KEY[1:]
    assert digest != checksum(slot[:BLOCK_BYTES], other)
    slot[len(slot) - TRAILER_BYTES + 8 : len(slot) - TRAILER_BYTES + 40] = other
    assert kind_of(slot, key=other) == "checksum"


def test_a_restamped_slot_changes_its_generation_alone(slot: memoryview) -> None:
    before = bytes(slot)
    digest = verify(slot, BLOCK_BYTES, KEY, 7)
    restamp(slot, 2**63 + 1)
    assert verify(slot, BLOCK_BYTES, KEY, 2**63 + 1) == digest
    assert kind_of(slot, generation=7) == "generation"
    restamp(slot, 7)
    assert slot == before


def test_padding_is_no_part_of_the_block(slot: memoryview) -> None:
    slot[BLOCK_BYTES] = 1
    verify(slot, BLOCK_BYTES, KEY, 7)

"""A slot: one block's bytes, and behind them the trailer by which a reader knows what it has been given.

    [ payload: block_bytes | padding | trailer: 64 bytes ]    pitch: a multiple of 4,096 bytes

The trailer travels with the bytes. Its checksum is seeded with the key, so a payload under another block's key does not
verify, whatever else went wrong at the sender. It finds errors; against a malicious peer it is no protection.
"""

from __future__ import annotations

import struct

import xxhash

from kvstore.errors import WrongBytes

PAGE = 4_096
TRAILER_BYTES = 64
_TRAILER = struct.Struct("<8s32sQQ8x")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = 40
_MAGIC = b"pgkvslt1"


def pitch_of(block_bytes: int) -> int:
    """Bytes from one slot to the next: payload and trailer, rounded up to whole pages."""
    return -(-(block_bytes + TRAILER_BYTES) // PAGE) * PAGE


def checksum(payload: memoryview, key: bytes) -> int:
    """64 bits over a block's payload and its ContentKey."""
    return int(xxhash.xxh3_64_intdigest(payload, int.from_bytes(key[:8], "little")))


def seal(slot: memoryview, block_bytes: int, key: bytes, generation: int) -> int:
    """Write the trailer of a slot whose payload is complete; returns its checksum."""
    digest = checksum(slot[:block_bytes], key)
    _TRAILER.pack_into(slot, len(slot) - TRAILER_BYTES, _MAGIC, key, generation, digest)
    return digest


def restamp(slot: memoryview, generation: int) -> None:
    """Give a slot that has been verified the generation it has in another pool. Key and checksum stay as they are."""
    _GENERATION.pack_into(slot, len(slot) - TRAILER_BYTES + _GENERATION_AT, generation)


def verify(slot: memoryview, block_bytes: int, key: bytes, generation: int) -> int:
    """The checksum of a slot that holds exactly the block asked for. Raises WrongBytes saying what is wrong with it."""
    magic, held, held_generation, digest = _TRAILER.unpack_from(slot, len(slot) - TRAILER_BYTES)
    if magic != _MAGIC:
        raise WrongBytes("trailer", "the slot carries no trailer")
    if held != key:
        raise WrongBytes("key", f"the slot holds block {held.hex()[:16]}, not {key.hex()[:16]}")
    if held_generation != generation:
        raise WrongBytes("generation", f"the slot is of generation {held_generation}, not {generation}")
    if checksum(slot[:block_bytes], key) != digest:
        raise WrongBytes("checksum", f"the bytes of block {key.hex()[:16]} are not those that were stored")
    return int(digest)

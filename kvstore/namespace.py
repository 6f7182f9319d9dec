"""What, besides tokens and adapters, decides whether two replicas may use each other's KV.

A block's *ContentKey* is its engine's own 32-byte hash under a `KvNamespace`. Tokens, LoRA and salt are in the hash;
everything else that changes the bytes is here. Any difference must miss and never collide, so the digest covers every
field, and a refusal names the ones that differ. How a replica splits heads and layers over its ranks is no part of it:
slots are parallelism-free (`kvstore.layout`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.bounds import Count, Name

CONTENT_KEY_BYTES = 32
"""Length of an engine's block hash."""

MAX_CONTENT_KEYS = 65_536
"""Blocks in one message: a million tokens in blocks of 16."""

SLOT_LAYOUT = "hl2td-v1"
"""Order of a slot's payload: heads, layers, K and V, tokens, dims. Part of the namespace: another order must miss."""


EngineIdentity = Annotated[dict[Name, Annotated[str, Meta(max_length=16_384)]], Meta(max_length=64)]
"""What an engine says of its weights and positions, by name."""


class KvNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal for the bytes under one ContentKey to be equal.

    `dtype` is the logical one ("fp8_e4m3" is not "fp8_e5m2"); `identity` holds what the engine says of its weights and
    positions, such as model, revision, weights and rope, by name; `hash_algorithm` how block hashes are made.
    """

    layout: Name = SLOT_LAYOUT
    dtype: Name
    block_size: Count
    layers: Count
    kv_heads: Count
    head_dim: Count
    block_bytes: Count
    hash_algorithm: Name
    identity: EngineIdentity

    @property
    def digest(self) -> bytes:
        """32 bytes over every field."""
        fields = (*sorted(self.identity.items()), *((name, getattr(self, name)) for name in _PLAIN))
        return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()

    def differences(self, other: KvNamespace) -> list[str]:
        """Every field in which the two differ, with both values, in words; [] when they are one namespace."""
        found = [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in _PLAIN
            if getattr(self, name) != getattr(other, name)
        ]
        for name in sorted(self.identity.keys() | other.identity.keys()):
            here, there = self.identity.get(name), other.identity.get(name)
            if here != there:
                found.append(f"{name}: {here!r} here, {there!r} there")
        return found


_PLAIN = tuple(name for name in KvNamespace.__struct_fields__ if name != "identity")


def pack_content_keys(keys: Collection[bytes]) -> bytes:
    """ContentKeys as they travel: one after the other. Raises ValueError for one that is not 32 bytes."""
    for key in keys:
        if len(key) != CONTENT_KEY_BYTES:
            raise ValueError(f"a content key has {CONTENT_KEY_BYTES} bytes, got {len(key)}")
    return b"".join(keys)


def unpack_content_keys(packed: bytes) -> list[bytes]:
    """The inverse, for what a peer sent. Raises ValueError for a length that is no multiple of 32, or too many keys."""
    if len(packed) % CONTENT_KEY_BYTES:
        raise ValueError(f"packed content keys must be a multiple of {CONTENT_KEY_BYTES} bytes, got {len(packed)}")
    if (count := len(packed) // CONTENT_KEY_BYTES) > MAX_CONTENT_KEYS:
        raise ValueError(f"{count} of them; the limit is {MAX_CONTENT_KEYS}")
    return [packed[at : at + CONTENT_KEY_BYTES] for at in range(0, len(packed), CONTENT_KEY_BYTES)]

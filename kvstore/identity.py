"""Names of prompt prefixes and of KV blocks.

Two names, for two jobs:

* a *RouteKey* (64 bits) names a prompt prefix and decides where a request goes. The gateway computes it from the
  prompt, the agent from the token ids in the engine's KV events; both must get the same number. A collision costs a
  wrong guess, never a wrong answer.
* a *block hash* (32 bytes, see `engine_block_hash`) is the engine's own name of a full block, under which it shares KV.

RouteKeys are chained: the key of unit i is the low half of xxh3_128 over the unit's bytes, seeded with the key of
unit i-1; the first unit is seeded with the root of a `Namespace`. So one number stands for the whole prefix before it.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from kvstore.errors import IdentityError

UNIT_TOKENS = 16
"""Tokens in one RouteKey unit. Engine blocks that are multiples of it map onto whole runs of units."""

TEXT_UNIT_BYTES = 256
"""UTF-8 bytes in one RouteKey unit of a prompt whose token ids are unknown."""

TOKEN_BYTES = 4
"""Token ids travel and are hashed as little-endian u32."""

_MASK = (1 << 64) - 1
_hash128 = xxhash.xxh3_128_intdigest

ROOT_BLOCK_HASH = hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=pickle.HIGHEST_PROTOCOL)).digest()
"""Parent of every first block in vLLM's sha256 chain when PYTHONHASHSEED is unset."""


class Namespace(msgspec.Struct, frozen=True):
    """What, besides the tokens, decides whether two requests may share KV.

    `model` is the base model as served, `lora` an adapter name, `salt` a tenant's cache salt.
    """

    model: str
    lora: str = ""
    salt: str = ""

    def root(self, seed: int) -> int:
        """The key that the first unit of a prompt is chained to; `seed` is the deployment's (u64)."""
        return _hash128(msgspec.msgpack.encode((self.model, self.lora, self.salt)), seed & _MASK) & _MASK


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian u32. Raises IdentityError for an id that is not one."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise IdentityError(f"token ids must be integers in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain(root: int, packed: bytes | memoryview, unit_bytes: int = UNIT_TOKENS * TOKEN_BYTES) -> array[int]:
    """RouteKeys of every whole unit of `packed`, in order; a trailing part of a unit has no key."""
    view = memoryview(packed)
    keys = array("Q")
    append = keys.append
    key = root
    for start in range(0, len(view) - unit_bytes + 1, unit_bytes):
        key = _hash128(view[start : start + unit_bytes], key) & _MASK
        append(key)
    return keys


def token_keys(root: int, tokens: Iterable[int]) -> array[int]:
    """RouteKeys of the whole 16-token units of a prompt given as token ids."""
    return chain(root, pack_tokens(tokens))


def text_keys(root: int, text: bytes) -> array[int]:
    """RouteKeys of the whole 256-byte units of a prompt given as text."""
    return chain(root, text, TEXT_UNIT_BYTES)


def pack_keys(keys: Iterable[int]) -> bytes:
    """RouteKeys as they travel: little-endian u64."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(packed: bytes | memoryview) -> array[int]:
    """The inverse of `pack_keys`. Raises IdentityError when the length is no multiple of 8."""
    if len(packed) % 8:
        raise IdentityError(f"packed keys must be a multiple of 8 bytes, got {len(packed)}")
    keys = array("Q")
    keys.frombytes(packed)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys


def engine_block_hash(parent: bytes, tokens: Sequence[int], extra_keys: tuple[object, ...] | None = None) -> bytes:
    """vLLM's name of a full block (`--prefix-caching-hash-algo sha256`): 32 bytes.

    `parent` is the hash of the block before it, `ROOT_BLOCK_HASH` for the first; `extra_keys` holds tagged tuples such
    as `("cache_salt", salt)`. Source: vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py, 0.32.0.
    """
    return hashlib.sha256(pickle.dumps((parent, tuple(tokens), extra_keys), pickle.HIGHEST_PROTOCOL)).digest()


def wire_block_hash(block_hash: bytes) -> int:
    """A block hash as vLLM puts it into KV events by default: its last 8 bytes, big-endian, unsigned."""
    return int.from_bytes(block_hash[-8:], "big")

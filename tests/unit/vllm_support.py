"""What the tests of the vLLM connector share: requests, a rank's KV cache with known bytes, and the links between."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvstore.layout import Layout, Share
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.vllm.facts import Facts
from replica_agent.engines.vllm.paged_cache import PagedCache, open_paged_cache

DEADLINE_S = 20.0
SIZE = 4
"""Tokens in a block."""


def until(condition: Callable[[], object], what: str = "") -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.001)


def facts(socket: Path | str = "", **more: Any) -> Facts:
    """Rank 0 of a small model's engine; `more` fields are others."""
    fields: dict[str, Any] = {
        "engine_id": "life-1",
        "socket": str(socket),
        "tp": 1,
        "pp": 1,
        "rank": 0,
        "layers": 3,
        "kv_heads": 4,
        "head_dim": 8,
        "dtype": "float32",
        "block_size": SIZE,
        "blocks": 24,
        "first_layer": 0,
        "rank_layers": 3,
        "hash_algorithm": "sha256",
        "interior": "TEST",
        "loads": True,
        "identity": {"model": "m"},
    }
    return Facts(**(fields | more))


def link_to(socket: Path | str, engine: Facts, **more: Any) -> PoolLink:
    """A link that is connected."""
    import msgspec

    link = PoolLink(str(socket), msgspec.structs.replace(engine.hello(), **more))
    until(lambda: link.client is not None, "connected")
    return link


def keys_of(tokens: Sequence[int], size: int = SIZE) -> list[bytes]:
    """The hash of each full block, over all before it."""
    keys: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        parent = keys[-1] if keys else b""
        keys.append(hashlib.sha256(parent + repr(tokens[end - size : end]).encode()).digest())
    return keys


def block_bytes(key: bytes, layout: Layout) -> bytes:
    """What a slot holds for the block of this key."""
    return hashlib.shake_128(key).digest(layout.slot_bytes)


def share_of_block(key: bytes, layout: Layout, share: Share) -> torch.Tensor:
    """What a rank's caches hold for it: [layers, heads, bytes]."""
    whole = torch.frombuffer(bytearray(block_bytes(key, layout)), dtype=torch.uint8)
    slabs = whole.view(layout.geometry.kv_heads, layout.geometry.layers, -1)
    heads = slice(share.first_head, share.first_head + share.heads)
    layers = slice(share.first_layer, share.first_layer + share.layers)
    return slabs[heads, layers].transpose(0, 1)


@dataclass(eq=False)
class Rank:
    """A rank's tensors and their paged cache."""

    facts: Facts
    caches: list[torch.Tensor]
    cache: PagedCache

    @property
    def bytes(self) -> torch.Tensor:
        """All of it: [layers, blocks, heads, bytes]."""
        return torch.stack([cache.view(torch.uint8).flatten(2) for cache in self.caches])

    def holds(self, block: int, key: bytes) -> bool:
        """Whether a block has this key's bytes."""
        return bool(torch.equal(self.bytes[:, block], share_of_block(key, self.facts.layout, self.facts.share)))

    def compute(self, block: int, key: bytes) -> None:
        """Give it these bytes."""
        told = share_of_block(key, self.facts.layout, self.facts.share)
        for cache, slabs in zip(self.caches, told, strict=True):
            cache[block] = slabs.contiguous().view(cache.dtype).view(cache.shape[1:])


def rank_of(engine: Facts) -> Rank:
    """As vLLM lays it out on a CPU: the layers one after the other in one piece of memory."""
    heads, blocks = engine.share.heads, engine.blocks
    memory = torch.zeros(engine.rank_layers, blocks, heads, engine.block_size, 2 * engine.head_dim)
    caches = list(memory)
    return Rank(engine, caches, open_paged_cache(caches, engine.layout, engine.share, blocks=blocks))


@dataclass(eq=False)
class Request:
    """vLLM's request, as far as the connector reads it."""

    request_id: str
    tokens: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: object | None = None
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = keys_of(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

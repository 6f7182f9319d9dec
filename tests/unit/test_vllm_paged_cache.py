"""Blocks of a paged cache to slots and back, for every layout and every way of splitting a model over ranks."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.geometry import DTYPE_BYTES, KvGeometry, stage_layers
from kvstore.layout import Layout, Share, share_of
from replica_agent.engines.vllm.errors import PoolUnusable
from replica_agent.engines.vllm.paged_cache import DevicePagedCache, PagedCache, open_paged_cache

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ORDERS = {"LBHNC": "lbhn", "LBNHC": "lbnh", "LHBNC": "lhbn", "BLHNC": "blhn", "BLNHC": "blnh", "BHLNC": "bhln"}
"""vLLM's layouts: layers, blocks, heads and tokens, the outermost first."""

BLOCKS = 5


def caches_of(layout: Layout, share: Share, order: str, pieces: int, rng: random.Random) -> torch.Tensor:
    """Caches of random bytes as [layers, blocks, heads, tokens, content], in memory in this order."""
    sizes = {"l": share.layers, "b": BLOCKS * pieces, "h": share.heads, "n": layout.block_size // pieces}
    content = layout.layer_bytes // layout.block_size // DTYPE_BYTES[layout.geometry.dtype]
    dtype = DTYPES[layout.geometry.dtype]
    shape = [sizes[axis] for axis in order] + [content]
    size = torch.Size(shape).numel() * dtype.itemsize
    random_bytes = torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8)
    ordered = random_bytes.view(dtype).view(shape)
    return ordered.permute(*(order.index(axis) for axis in "lbhn"), 4)


def naive_block(caches: list[torch.Tensor], block: int, layout: Layout, pieces: int) -> bytes:
    """A rank's share of a block as [heads][layers][slab], element by element."""
    told = b""
    for head in range(caches[0].shape[1]):
        for cache in caches:
            for piece in range(block * pieces, (block + 1) * pieces):
                for token in range(cache.shape[2]):
                    told += bytes(cache[piece, head, token].view(torch.uint8).tolist())
    return told


def naive_slots(layout: Layout, shares: list[Share], told: list[bytes]) -> bytes:
    """The slot that ranks write together."""
    slot = bytearray(layout.slot_bytes)
    size = layout.layer_bytes
    for share, part in zip(shares, told, strict=True):
        for head in range(share.heads):
            for layer in range(share.layers):
                at = ((share.first_head + head) * layout.geometry.layers + share.first_layer + layer) * size
                come = (head * share.layers + layer) * size
                slot[at : at + size] = part[come : come + size]
    return bytes(slot)


@pytest.mark.parametrize("kind", [PagedCache, DevicePagedCache])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_write_a_slot_together_and_others_read_it(kind: type[PagedCache], seed: int) -> None:
    rng = random.Random(seed)
    geometry = KvGeometry(
        layers=rng.randrange(1, 6), kv_heads=rng.choice((1, 2, 4)), head_dim=8, dtype=rng.choice(list(DTYPES))
    )
    layout = Layout(geometry, 4 * rng.randrange(1, 3))

    def engine() -> tuple[list[Share], list[list[torch.Tensor]], list[PagedCache], int]:
        tp = rng.choice([each for each in (1, 2, 4, 8) if each <= 2 * geometry.kv_heads])
        pp = rng.randrange(1, min(3, geometry.layers) + 1)
        order, pieces, apart = ORDERS[rng.choice(list(ORDERS))], rng.choice((1, 2, 4)), rng.random() < 0.3
        shares, memories = [], []
        for stage in stage_layers(geometry.layers, pp):
            for rank in range(tp):
                share = share_of(geometry, tp=tp, rank=rank)
                share = share._replace(first_layer=stage.start, layers=len(stage))
                shares.append(share)
                caches = list(caches_of(layout, share, order, pieces, rng))
                # As where each layer has memory of its own.
                memories.append([cache.clone() for cache in caches] if apart else caches)
        opened = [kind(caches, layout, share, blocks=BLOCKS) for caches, share in zip(memories, shares, strict=True)]
        return shares, memories, opened, pieces

    shares, memories, writers, pieces = engine()
    for block in range(BLOCKS):
        slot = bytearray(rng.randbytes(layout.slot_bytes))
        told = [naive_block(caches, block, layout, pieces) for caches in memories]
        for share, writer in zip(shares, writers, strict=True):
            if share.primary:
                writer.read(block, memoryview(slot))
        primary = [(share, part) for share, part in zip(shares, told, strict=True) if share.primary]
        assert bytes(slot) == naive_slots(layout, [share for share, _ in primary], [part for _, part in primary])
        # Another engine, split in another way.
        shares_there, memories_there, readers, pieces_there = engine()
        target = rng.randrange(BLOCKS)
        before = [
            [naive_block(caches, each, layout, pieces_there) for each in range(BLOCKS)] for caches in memories_there
        ]
        for share, caches, reader, old in zip(shares_there, memories_there, readers, before, strict=True):
            reader.write(target, memoryview(slot))
            again = bytearray(slot)
            reader.read(target, memoryview(again))
            assert again == slot, "what is read back is what was written"
            for each in range(BLOCKS):
                if each != target:
                    assert naive_block(caches, each, layout, pieces_there) == old[each], "no other block is touched"
            ours = naive_slots(layout, [share], [b"\xff" * share.bytes_of(layout)])
            part = naive_slots(layout, [share], [naive_block(caches, target, layout, pieces_there)])
            assert part == bytes(byte & mask for byte, mask in zip(slot, ours, strict=True)), "its share, and all of it"


def test_a_block_of_layers_in_one_piece_is_one_copy() -> None:
    layout = Layout(KvGeometry(layers=4, kv_heads=2, head_dim=8, dtype="float32"), 4)
    memory = torch.zeros(4, BLOCKS, 2, 4, 16)
    share = share_of(layout.geometry)
    assert len(open_paged_cache(list(memory), layout, share, blocks=BLOCKS)._runs) == 1
    apart = [cache.clone() for cache in memory]
    assert len(open_paged_cache(apart, layout, share, blocks=BLOCKS)._runs) == 4


@pytest.mark.parametrize(
    ("shape", "blocks", "named"),
    [
        ((BLOCKS, 2, 4, 16), BLOCKS + 1, "block_size: 6 blocks of 4 tokens"),
        ((BLOCKS, 2, 3, 16), BLOCKS, "block_size"),
        ((BLOCKS, 4, 4, 16), BLOCKS, "kv_heads: expected 2"),
        ((BLOCKS, 2, 4, 18), BLOCKS, "kv_cache: expected 64 bytes a token in a head, got 72"),
        ((2, BLOCKS, 2, 4, 8), BLOCKS, "kv_cache: expected \\[blocks, heads, tokens, content\\]"),
    ],
)
def test_a_cache_of_another_shape_is_refused_by_name(shape: tuple[int, ...], blocks: int, named: str) -> None:
    layout = Layout(KvGeometry(layers=1, kv_heads=2, head_dim=8, dtype="float32"), 4)
    with pytest.raises(PoolUnusable, match=named):
        open_paged_cache([torch.zeros(shape)], layout, share_of(layout.geometry), blocks=blocks)


def test_layers_without_a_cache_of_their_own_are_refused() -> None:
    layout = Layout(KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float32"), 4)
    with pytest.raises(PoolUnusable, match="layers: 1 have a KV cache of their own, expected 2"):
        open_paged_cache([torch.zeros(BLOCKS, 2, 4, 16)], layout, share_of(layout.geometry), blocks=BLOCKS)

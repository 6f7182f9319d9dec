"""Slots are parallelism-free: what the ranks of one grid write, the ranks of any other read, on real tensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvstore.errors import GeometryError, GeometryMismatch
from kvstore.geometry import KvGeometry, stage_layers
from kvstore.layout import Layout, Piece, Share, differences, pieces, share_of

GRIDS = list(product((1, 2, 4, 8), (1, 2, 4)))
TOKENS = 16
GROUPED = KvGeometry(layers=10, kv_heads=8, head_dim=32, dtype="bfloat16")
FEW_HEADS = KvGeometry(layers=10, kv_heads=2, head_dim=32, dtype="float32")
LATENT = KvGeometry(layers=10, kv_heads=1, head_dim=576, dtype="bfloat16", v_head_dim=0)


def block(geometry: KvGeometry, seed: int = 0) -> torch.Tensor:
    """A block of the whole model: [kv_heads, layers, K and V, tokens, head_dim]; a latent has no V."""
    parts = 1 if geometry.latent else 2
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.kv_heads, geometry.layers, parts, TOKENS, geometry.head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, geometry.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def own_block(whole: torch.Tensor, share: Share) -> torch.Tensor:
    """What a rank with this share keeps of the block, densely."""
    heads = slice(share.first_head, share.first_head + share.heads)
    return as_bytes(whole[heads, share.first_layer : share.first_layer + share.layers])


def shares(geometry: KvGeometry, tp: int, pp: int) -> list[Share]:
    return [share_of(geometry, tp=tp, pp=pp, rank=rank) for rank in range(tp * pp)]


def scatter(layout: Layout, whole: torch.Tensor, grid: list[Share]) -> torch.Tensor:
    """A slot that the primary ranks of a grid wrote, and in which each byte was written once."""
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    written = torch.zeros(layout.slot_bytes, dtype=torch.int32)
    for share in grid:
        if share.primary:
            own = own_block(whole, share)
            for at, offset, length in pieces(layout, share):
                slot[at : at + length] = own[offset : offset + length]
                written[at : at + length] += 1
    assert (written == 1).all()
    return slot


def gather(layout: Layout, slot: torch.Tensor, share: Share) -> torch.Tensor:
    own = torch.zeros(share.bytes_of(layout), dtype=torch.uint8)
    for at, offset, length in pieces(layout, share):
        own[offset : offset + length] = slot[at : at + length]
    return own


@pytest.mark.parametrize("geometry", [GROUPED, FEW_HEADS, LATENT], ids=["8 heads", "2 heads", "latent"])
def test_any_grid_reads_what_any_grid_wrote(geometry: KvGeometry) -> None:
    layout = Layout(geometry, TOKENS)
    whole = block(geometry)
    assert layout.slot_bytes == whole.nbytes
    for writers in GRIDS:
        slot = scatter(layout, whole, shares(geometry, *writers))
        assert torch.equal(slot, as_bytes(whole)), "the slot is the block of an engine of one rank"
        for readers in GRIDS:
            for share in shares(geometry, *readers):
                assert torch.equal(gather(layout, slot, share), own_block(whole, share)), (writers, readers, share)


def test_values_of_other_dims_keep_their_place() -> None:
    """K of 24 and V of 8 dims: what lies between a head's layers is the sum of both."""
    geometry = KvGeometry(layers=3, kv_heads=4, head_dim=24, dtype="fp8", v_head_dim=8)
    layout = Layout(geometry, TOKENS)
    whole = torch.arange(4 * 3 * TOKENS * 32).remainder(251).to(torch.uint8).view(4, 3, 1, TOKENS, 32)
    slot = scatter(layout, whole, shares(geometry, 2, 3))
    assert torch.equal(slot, as_bytes(whole))


def test_a_tensor_parallel_share_is_one_piece_and_a_stage_one_a_head() -> None:
    layout = Layout(GROUPED, TOKENS)
    for tp in (1, 2, 4, 8, 16):
        for share in shares(GROUPED, tp, 1):
            assert len(pieces(layout, share)) == 1
    for share in shares(GROUPED, 2, 2):
        found = pieces(layout, share)
        assert len(found) == share.heads == 4
        assert sum(piece.length for piece in found) == share.bytes_of(layout)
        ends = [piece.slot_offset + piece.length for piece in found]
        assert all(end < after.slot_offset for end, after in zip(ends, found[1:], strict=False)), (
            "merged where adjacent"
        )
    size = layout.layer_bytes
    assert pieces(layout, share_of(GROUPED, tp=8, pp=2, rank=9)) == [Piece(15 * size, 0, 5 * size)]


def test_more_ranks_than_heads_share_them_and_one_writes() -> None:
    """Ranks next to each other keep one head, as engines place them."""
    grid = shares(FEW_HEADS, 8, 1)
    assert [share.first_head for share in grid] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [share.primary for share in grid] == [True, False, False, False, True, False, False, False]
    latent = shares(LATENT, 4, 2)
    assert {(share.first_head, share.heads) for share in latent} == {(0, 1)}
    assert [share.primary for share in latent] == [True, False, False, False] * 2


def test_stages_may_be_given() -> None:
    stages = [range(7), range(7, 10)]
    layout, whole = Layout(GROUPED, TOKENS), block(GROUPED)
    grid = [share_of(GROUPED, tp=2, pp=2, rank=rank, stages=stages) for rank in range(4)]
    assert [(share.first_layer, share.layers) for share in grid] == [(0, 7), (0, 7), (7, 3), (7, 3)]
    assert torch.equal(scatter(layout, whole, grid), as_bytes(whole))
    assert share_of(GROUPED, pp=4, rank=2, stages=stage_layers(10, 4)) == share_of(GROUPED, pp=4, rank=2)


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        ({"tp": 3}, "tp: 3 ranks and 8 KV heads: neither divides the other"),
        ({"tp": 12}, "tp: 12 ranks and 8 KV heads"),
        ({"pp": 11}, "pp: 11 stages cannot share 10 layers"),
        ({"tp": 2, "rank": 2}, "rank: there is no rank 2 in a grid of tp 2 x pp 1"),
        ({"rank": -1}, "rank: there is no rank -1"),
        ({"tp": 0}, "rank: there is no rank 0 in a grid of tp 0"),
        ({"pp": 2, "stages": [range(5), range(6, 10)]}, "stages: 2 ranges must cover layers 0 to 9"),
        ({"pp": 2, "stages": [range(10), range(10, 10)]}, "stages: "),
        ({"pp": 2, "stages": [range(10)]}, "stages: "),
    ],
)
def test_a_grid_that_engines_do_not_build_is_refused(grid: dict[str, object], named: str) -> None:
    with pytest.raises(GeometryMismatch, match=f"^{named}"):
        share_of(GROUPED, **grid)  # type: ignore[arg-type]


def test_a_refusal_names_every_field_that_differs_with_both_values() -> None:
    ours = Layout(GROUPED, TOKENS)
    assert differences(ours, Layout(GROUPED, TOKENS)) == []
    spelled = KvGeometry(layers=10, kv_heads=8, head_dim=32, dtype="bfloat16", v_head_dim=32)
    assert differences(ours, Layout(spelled, TOKENS)) == []
    other = KvGeometry(layers=12, kv_heads=8, head_dim=32, dtype="fp8", v_head_dim=16)
    assert differences(ours, Layout(other, 32)) == [
        "layers: 10 here, 12 there",
        "dtype: 'bfloat16' here, 'fp8' there",
        "v_head_dim: 32 here, 16 there",
        "block_size: 16 here, 32 there",
    ]


def test_a_block_has_tokens() -> None:
    with pytest.raises(GeometryError, match=r"^block_size: expected a positive integer, got 0"):
        Layout(GROUPED, 0)

"""Where each rank's part of a block lies in a slot, for any way of splitting a model over ranks.

A slot holds one block of the whole model, whoever wrote it, as [kv_heads][layers][2][tokens][dim] (`SLOT_LAYOUT`):

    head 0                                  head 1              ...
    layer 0             layer 1    ...      layer 0   ...
    K tokens, V tokens  K, V       ...

Heads are outermost and layers next, because these are the axes that ranks split: a tensor-parallel share is then one
piece, a pipeline stage's one piece a head, and engines with different grids exchange slots without reshaping them.
With tokens or layers outermost, the usual order of paged caches, the same shares would be a piece a token or a layer.
Latent attention (MLA) has one head without V, and every rank of a tensor-parallel group keeps all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstore.errors import GeometryError, GeometryMismatch
from kvstore.geometry import KvGeometry, stage_layers


class Layout(msgspec.Struct, frozen=True):
    """The order of bytes in a slot: a model's geometry, and the tokens in a block."""

    geometry: KvGeometry
    block_size: int

    def __post_init__(self) -> None:
        """Raises GeometryError naming the field."""
        if self.block_size <= 0:
            raise GeometryError(f"block_size: expected a positive integer, got {self.block_size!r}")

    @property
    def slot_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.geometry.block_bytes(self.block_size)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one head in one layer: the K of all tokens of a block, then their V."""
        return self.geometry.row_bytes * self.block_size


class Share(NamedTuple):
    """What one rank keeps of every block. Of ranks with the same share one is `primary`: it writes, the others only
    read, so that the primary ranks of a grid write every byte of a slot exactly once."""

    first_head: int
    heads: int
    first_layer: int
    layers: int
    primary: bool

    def bytes_of(self, layout: Layout) -> int:
        """Bytes of the share, which are [heads][layers][2][tokens][dim] densely, too."""
        return self.heads * self.layers * layout.layer_bytes


class Piece(NamedTuple):
    """`length` bytes that lie at `slot_offset` in a slot and at `share_offset` in a rank's own dense block."""

    slot_offset: int
    share_offset: int
    length: int


def share_of(
    geometry: KvGeometry, *, tp: int = 1, pp: int = 1, rank: int = 0, stages: Sequence[range] | None = None
) -> Share:
    """The share of `rank` = pp_rank * tp + tp_rank of a grid.

    `stages` gives the layers of each stage where an engine splits them otherwise than `stage_layers` does. With more
    ranks than heads, neighbouring ranks keep the same head and the first of them is primary. Raises GeometryMismatch
    for a grid that engines do not build: one that splits a head, has a stage without layers, or lacks the rank.
    """
    if tp < 1 or pp < 1 or not 0 <= rank < tp * pp:
        raise GeometryMismatch(f"rank: there is no rank {rank} in a grid of tp {tp} x pp {pp}")
    pp_rank, tp_rank = divmod(rank, tp)
    layers = _stages(geometry, pp, stages)[pp_rank]
    heads = geometry.kv_heads
    if heads % tp and tp % heads:
        raise GeometryMismatch(f"tp: {tp} ranks and {heads} KV heads: neither divides the other")
    sharers = max(1, tp // heads)
    each = geometry.heads_per_rank(tp)
    return Share(tp_rank // sharers * each, each, layers.start, len(layers), primary=tp_rank % sharers == 0)


def pieces(layout: Layout, share: Share) -> list[Piece]:
    """How a share maps onto a slot: as few pieces as possible, in the order of both."""
    model_layers = layout.geometry.layers
    if share.layers == model_layers:
        start = share.first_head * model_layers * layout.layer_bytes
        return [Piece(start, 0, share.bytes_of(layout))]
    length = share.layers * layout.layer_bytes
    starts = [(share.first_head + head) * model_layers + share.first_layer for head in range(share.heads)]
    return [Piece(start * layout.layer_bytes, head * length, length) for head, start in enumerate(starts)]


def differences(ours: Layout, theirs: Layout) -> list[str]:
    """Why two engines cannot exchange slots: each field that differs, with both values; [] when they can.

    How each of them splits the model over ranks does not matter. Windows do: they say which blocks of a layer are kept.
    """
    found = [
        f"{name}: {mine!r} here, {other!r} there"
        for name in KvGeometry.__struct_fields__
        if (mine := _field(ours, name)) != (other := _field(theirs, name))
    ]
    if ours.block_size != theirs.block_size:
        found.append(f"block_size: {ours.block_size} here, {theirs.block_size} there")
    return found


def _field(layout: Layout, name: str) -> object:
    value = getattr(layout.geometry, name)
    return layout.geometry.head_dim if name == "v_head_dim" and value is None else value


def _stages(geometry: KvGeometry, pp: int, stages: Sequence[range] | None) -> Sequence[range]:
    if stages is None:
        try:
            return stage_layers(geometry.layers, pp)
        except GeometryError as error:
            raise GeometryMismatch(str(error)) from error
    covered = [layer for stage in stages for layer in stage]
    if len(stages) != pp or not all(stages) or covered != list(range(geometry.layers)):
        raise GeometryMismatch(f"stages: {pp} ranges must cover layers 0 to {geometry.layers - 1} in order, each once")
    return stages

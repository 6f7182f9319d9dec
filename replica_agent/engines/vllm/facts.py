"""What a rank knows of its engine, and the hello that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.engine_messages import EngineHello
from kvstore.errors import GeometryError
from kvstore.geometry import KvGeometry
from kvstore.layout import Layout, Share, share_of
from replica_agent.engines.vllm.errors import PoolUnusable

HASHES = ("sha256", "sha256_cbor")
"""With 32 bytes, and the same in every process: the others are shorter, or seeded at random."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One engine, as one of its ranks sees it. `interior` names how K and V lie in a slab; `loads` is whether the
    engine computes what could not be loaded; `identity` as in `KvNamespace`."""

    engine_id: str
    socket: str
    tp: int
    pp: int
    rank: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    blocks: int
    first_layer: int
    rank_layers: int
    hash_algorithm: str
    interior: str
    loads: bool
    identity: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The order of a slot. Raises PoolUnusable naming the field."""
        try:
            geometry = KvGeometry(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype)
            return Layout(geometry, self.block_size)
        except GeometryError as error:
            raise PoolUnusable(str(error)) from error

    @property
    def share(self) -> Share:
        """What this rank keeps of a block. Raises PoolUnusable naming the field.

        The layers are those that the rank has: an engine may split them over its stages in its own way.
        """
        try:
            heads = share_of(self.layout.geometry, tp=self.tp, rank=self.rank % self.tp)
        except GeometryError as error:
            raise PoolUnusable(str(error)) from error
        return heads._replace(first_layer=self.first_layer, layers=self.rank_layers)

    def hello(self) -> EngineHello:
        """As this rank says it. Raises PoolUnusable naming the field."""
        if self.hash_algorithm not in HASHES:
            raise PoolUnusable(
                f"--prefix-caching-hash-algo: expected one of {', '.join(HASHES)}, got {self.hash_algorithm}"
            )
        return EngineHello(
            engine_id=self.engine_id,
            role="worker",
            tp=self.tp,
            pp=self.pp,
            rank=self.rank,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            layout=f"hl-v1:{self.interior}",
            block_size=self.block_size,
            block_bytes=self.layout.slot_bytes,
            hash_algorithm=self.hash_algorithm,
            identity=self.identity,
            loads=self.loads,
        )

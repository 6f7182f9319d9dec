"""The KV tensor: pages of `block_size` tokens, and the row numbers by which a step reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replica_agent.reference.block_memory import BlockMemory
from replica_agent.reference.weights import ModelConfig


class PagedKv:
    """Owns the KV of every block.

    `blocks` is [num_blocks, kv_heads, layers, 2, block_size, head_dim] and contiguous, so `blocks[i]` is all of block i
    in one piece of `block_bytes`; heads outermost, so that a head is one piece too. The compute thread alone writes it,
    but for the blocks that a `Search` loads.

    Two flat views of the same memory serve the model: `token_rows` (one token of one head and layer, K or V) to write,
    and `block_rows` (one whole block of the same) to read.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = config.kv_heads
        self.layers = config.layers
        self.head_dim = config.head_dim
        shape = (num_blocks, config.kv_heads, config.layers, 2, block_size, config.head_dim)
        # Zeros, not garbage: a masked-out position still enters a product, and 0 * NaN is NaN.
        self.blocks = torch.zeros(shape, dtype=dtype)
        self.token_rows = self.blocks.view(-1, config.head_dim)
        self.block_rows = self.blocks.view(-1, block_size * config.head_dim)
        self._head = torch.arange(config.kv_heads)
        self._part = torch.arange(2)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads."""
        return self.blocks[0].nbytes

    def memory(self) -> BlockMemory:
        """The same bytes for other threads; valid as long as this object."""
        return BlockMemory(self.blocks.data_ptr(), self.block_bytes)

    def write_rows(self, slots: Sequence[int]) -> torch.Tensor:
        """Rows of `token_rows`, [layers, T * 2 * kv_heads], for tokens at `slots` (block * block_size + offset).

        Within a layer they run token by token, all K heads then all V heads: the order of a projection's output.
        """
        slot = torch.tensor(slots)
        block, offset = slot // self.block_size, slot % self.block_size
        lane = self._lanes(block.view(-1, 1, 1), self._head.view(1, 1, -1), self._part.view(1, -1, 1))
        first = (lane * self.block_size + offset.view(-1, 1, 1)).reshape(1, -1)
        return first + torch.arange(self.layers).unsqueeze(1) * (2 * self.block_size)

    def read_rows(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows of `block_rows`, [layers, 2 * B * kv_heads * N], of B block tables of N blocks each.

        Gathered, one layer is [2, B, kv_heads, N * block_size, head_dim]: K and V, ready for attention.
        """
        table = torch.tensor(tables)
        lane = self._lanes(table[None, :, None, :], self._head.view(1, 1, -1, 1), self._part.view(-1, 1, 1, 1))
        return lane.reshape(1, -1) + torch.arange(self.layers).unsqueeze(1) * 2

    def _lanes(self, block: torch.Tensor, head: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return (block * self.kv_heads + head) * (self.layers * 2) + part

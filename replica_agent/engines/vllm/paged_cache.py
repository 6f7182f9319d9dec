"""A rank's paged KV cache, as blocks that go to and from the agent's slots."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvstore.layout import Layout, Share
from replica_agent.engines.vllm.errors import PoolUnusable


class PagedCache:
    """Copies one block of all of a rank's layers at a time; owns nothing but views of the engine's tensors.

    A layer's cache is [blocks, heads, tokens, content], in whatever order its strides say; a slot is [heads][layers]
    [slab] of the whole model. A slab, one block of one head in one layer, is moved as it is: how K and V lie in it is
    the attention backend's business, and part of the layout's name. Where the backend splits a block of the cache
    manager into several of its kernel, they follow one another in the slab.

    Any thread may call it, and the bytes are copied when a call returns; who may touch a block when is the caller's
    business. The copies let go of the interpreter lock and take no thread but the caller's: the engine's own threads
    compute meanwhile.
    """

    def __init__(self, caches: Sequence[torch.Tensor], layout: Layout, share: Share, *, blocks: int) -> None:
        """`caches` are those of the share's layers, in order. Raises PoolUnusable naming what does not fit."""
        if len(caches) != share.layers:
            raise PoolUnusable(f"layers: {len(caches)} have a KV cache of their own, expected {share.layers}")
        self._runs = _stacked([_slabs(cache, layout, share, blocks) for cache in caches])
        self._slot = (layout.geometry.kv_heads, layout.geometry.layers, *self._runs[0].shape[3:])
        self._heads = slice(share.first_head, share.first_head + share.heads)
        self._first_layer = share.first_layer

    def read(self, block: int, slot: memoryview) -> None:
        """Copy this rank's share of a block out, into the slot of a whole block."""
        for run, part in self._parts(slot):
            np.copyto(part, run[:, block].transpose(0, 1).numpy())

    def write(self, block: int, slot: memoryview) -> None:
        """Copy this rank's share of a slot in."""
        for run, part in self._parts(slot):
            np.copyto(run[:, block].transpose(0, 1).numpy(), part)

    def _parts(self, slot: memoryview) -> list[tuple[torch.Tensor, npt.NDArray[np.uint8]]]:
        """Each run of layers, and where it lies in a slot: [heads][layers][slab]."""
        whole = np.frombuffer(slot, np.uint8).reshape(self._slot)[self._heads]
        parts, layer = [], self._first_layer
        for run in self._runs:
            parts.append((run, whole[:, layer : layer + len(run)]))
            layer += len(run)
        return parts


class DevicePagedCache(PagedCache):
    """The same on an accelerator: a block is gathered into one piece there, and crosses to the host in one copy, on a
    stream of its own beside the one that computes."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: Layout, share: Share, *, blocks: int) -> None:
        super().__init__(caches, layout, share, blocks=blocks)
        device = caches[0].device
        self.stream = _stream(device) if device.type == "cuda" else None

    def read(self, block: int, slot: memoryview) -> None:
        with self._on_stream():
            for run, part in self._parts(slot):
                torch.from_numpy(part).copy_(run[:, block].transpose(0, 1).contiguous())
        self._wait()

    def write(self, block: int, slot: memoryview) -> None:
        with self._on_stream():
            for run, part in self._parts(slot):
                run[:, block].transpose(0, 1).copy_(torch.from_numpy(part).to(run.device))
        self._wait()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def open_paged_cache(caches: Sequence[torch.Tensor], layout: Layout, share: Share, *, blocks: int) -> PagedCache:
    """The one for the device that these tensors are on. Raises PoolUnusable naming what does not fit."""
    kinds = {cache.device.type for cache in caches}
    if kinds == {"cpu"}:
        return PagedCache(caches, layout, share, blocks=blocks)
    if kinds == {"cuda"}:
        return DevicePagedCache(caches, layout, share, blocks=blocks)
    raise PoolUnusable(f"device: the KV cache is on {', '.join(sorted(kinds)) or 'none'}, expected cpu or cuda")


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _slabs(cache: torch.Tensor, layout: Layout, share: Share, blocks: int) -> torch.Tensor:
    """A layer's bytes as [blocks, heads, kernel blocks in a block, tokens of each, bytes of a token]."""
    if cache.dim() != 4 or cache.stride(3) != 1:
        raise PoolUnusable(f"kv_cache: expected [blocks, heads, tokens, content], got {_described(cache)}")
    data = cache.view(torch.uint8)
    if data.shape[1] != share.heads:
        raise PoolUnusable(f"kv_heads: expected {share.heads} on this rank, the KV cache is {_described(cache)}")
    pieces, rest = divmod(layout.block_size, data.shape[2])
    if rest or data.shape[0] != blocks * pieces:
        raise PoolUnusable(
            f"block_size: {blocks} blocks of {layout.block_size} tokens do not make up a KV cache {_described(cache)}"
        )
    if layout.block_size * data.shape[3] != layout.layer_bytes:
        raise PoolUnusable(
            f"kv_cache: expected {layout.layer_bytes // layout.block_size} bytes a token in a head, got {data.shape[3]}"
        )
    return data.view(blocks, pieces, *data.shape[1:]).transpose(1, 2)


def _stacked(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of single layers as few views of [layers, ...]: one where the layers lie at even distances, as they do in
    vLLM, so that a block is one copy and not one a layer."""
    first = views[0]
    steps = {after.data_ptr() - before.data_ptr() for before, after in pairwise(views)}
    memory = {(view.untyped_storage().data_ptr(), view.stride()) for view in views}
    if len(memory) == 1 and len(steps) <= 1 and min(steps, default=0) >= 0:
        shape, stride = (len(views), *first.shape), (*steps, 0)[:1] + first.stride()
        return [first.as_strided(shape, stride, first.storage_offset())]
    return [view.unsqueeze(0) for view in views]


def _described(cache: torch.Tensor) -> str:
    return f"{list(cache.shape)} with strides {list(cache.stride())}"

"""The bytes of the KV blocks, for threads other than the one that computes."""

from __future__ import annotations

import ctypes


class BlockMemory:
    """Copies whole blocks of `block_bytes` in and out of the memory at `address`, which must outlive this.

    Owns nothing. The copies let go of the interpreter lock, so that computing goes on; who may touch a block when is
    the caller's business.
    """

    def __init__(self, address: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._address = address

    def read(self, block: int, into: memoryview) -> None:
        """Copy a block out, into writable memory of exactly `block_bytes`."""
        ctypes.memmove(self._outside(into), self._address + block * self.block_bytes, self.block_bytes)

    def write(self, block: int, source: memoryview) -> None:
        """Copy a block in."""
        ctypes.memmove(self._address + block * self.block_bytes, self._outside(source), self.block_bytes)

    def _outside(self, view: memoryview) -> ctypes.Array[ctypes.c_char]:
        # Checks the length too, and keeps the memory mapped while it is used.
        if len(view) != self.block_bytes:
            raise ValueError(f"{len(view)} bytes for a block of {self.block_bytes}")
        return (ctypes.c_char * self.block_bytes).from_buffer(view)

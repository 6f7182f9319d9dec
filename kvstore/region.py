"""The memory of a pool: one shared region of slots that an engine, this agent and peers on this host can map."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvstore.errors import PoolError
from kvstore.slot import PAGE
from kvstore.transfer.base import Region


def make_region(slots: int, pitch: int) -> Region:
    """`slots` slots of `pitch` bytes (`kvstore.slot.pitch_of`) in a memfd, zeroed; pages are taken when first written.

    Raises PoolError for sizes that make no sense or that this host cannot map.
    """
    if slots < 1:
        raise PoolError(f"slots: must be above 0, got {slots}; the pool is smaller than one block")
    if pitch < PAGE or pitch % PAGE:
        raise PoolError(f"pitch: must be a multiple of {PAGE}, got {pitch}")
    size = slots * pitch
    fd = -1
    try:
        fd = os.memfd_create("kvstore-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        # Whoever is given the descriptor must not be able to take pages away under those who have mapped them.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped = mmap.mmap(fd, size)
    except (OSError, OverflowError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise PoolError(f"slots: cannot map {slots} of {pitch} bytes: {error}") from error
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # A kernel without huge pages: readers pin more pages, and that is all.
        pass
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    return Region(fd=fd, memory=memoryview(mapped), address=address, pitch=pitch, slots=slots)

"""The memory of a pool: one shared region of slots that an engine, this agent and peers on this host can map."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import PoolError
from kvstore.slot import PAGE
from kvstore.transfer.base import Region

_POPULATE_WRITE = 23
_PIECE = 8 * 1024 * 1024


def make_region(slots: int, pitch: int, tail: int = 0) -> Region:
    """`slots` slots of `pitch` bytes (`kvstore.slot.pitch_of`) in a memfd, zeroed, and `tail` bytes behind them; pages
    are taken when first written, or by `populate`.

    Raises PoolError for sizes that make no sense, that this host has not the memory for, or that it cannot map.
    """
    if slots < 1:
        raise PoolError(f"slots: must be above 0, got {slots}; the pool is smaller than one block")
    if pitch < PAGE or pitch % PAGE:
        raise PoolError(f"pitch: must be a multiple of {PAGE}, got {pitch}")
    size = slots * pitch + tail
    # The kernel maps more than there is, and later kills whoever is largest: that may be the engine.
    if (available := available_memory()) is not None and size > available:
        raise PoolError(f"slots: {slots} of {pitch} bytes are {size}, and {available} bytes of memory are available")
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
    everything, end = memoryview(mapped), slots * pitch
    return Region(fd, everything[:end], address, pitch, slots, everything[end:])


def populate(region: Region, going_on: Callable[[], bool]) -> None:
    """Take the pages of a region now, piece by piece, as long as `going_on`; contents stay. Blocks: for a thread.

    A page that is first touched by a fetch makes it wait: 10 us for each 4 KiB where memory is virtualized, so that 47
    MB took 120 ms instead of 10 (`benchmarks/README.md`, fetched against recomputed). Raises PoolError when the host
    has not so much memory; a kernel that cannot do it (before 5.14) leaves the pages to be touched.
    """
    size = region.slots * region.pitch
    for start in range(0, size, _PIECE):
        if not going_on():
            return
        count = min(_PIECE, size - start)
        # By way of libc, because mmap.madvise keeps the interpreter lock.
        if _madvise(region.address + start, count, _POPULATE_WRITE):
            error = ctypes.get_errno()
            if error == errno.EINVAL:
                return
            raise PoolError(f"slots: cannot take the memory of {region.slots} of {region.pitch}: {os.strerror(error)}")


def available_memory() -> int | None:
    """Bytes that this process can still take, on this host and within its control group; None where nobody says."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    # Of the group alone that a container sees as its root; its page cache counts as used, but can be taken back.
    with contextlib.suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(counts["inactive_file"]) - int(counts["active_file"])
        found.append(int((group / "memory.max").read_text()) - used)
    return min(found, default=None)


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

"""The memory of a pool, seen through its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvstore.errors import PoolError
from kvstore.region import make_region
from kvstore.slot import PAGE


def test_whoever_maps_the_descriptor_sees_the_same_bytes() -> None:
    region = make_region(3, 2 * PAGE)
    assert (region.slots, region.pitch, region.memory.nbytes) == (3, 2 * PAGE, 6 * PAGE)
    assert os.fstat(region.fd).st_size == 6 * PAGE
    assert region.memory == bytes(6 * PAGE)
    region.memory[5 * PAGE] = 7
    with mmap.mmap(region.fd, 6 * PAGE, prot=mmap.PROT_READ) as other:
        assert other[5 * PAGE] == 7
    assert ctypes.string_at(region.address + 5 * PAGE, 1) == b"\x07"


def test_nobody_can_take_its_pages_away() -> None:
    """A mapping of a file that shrinks is a SIGBUS to whoever touches it."""
    region = make_region(2, PAGE)
    for size in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    assert not os.get_inheritable(region.fd)


@pytest.mark.parametrize(
    ("slots", "pitch", "named"),
    [(0, PAGE, "slots"), (-1, PAGE, "slots"), (1, 0, "pitch"), (1, PAGE + 1, "pitch"), (2**50, 2**30, "slots")],
)
def test_sizes_that_cannot_be_are_named(slots: int, pitch: int, named: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolError, match=f"^{named}: "):
        make_region(slots, pitch)
    assert len(os.listdir("/proc/self/fd")) == before

"""The memory of a pool, seen through its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvstore.errors import PoolError
from kvstore.region import available_memory, make_region, populate
from kvstore.slot import PAGE
from kvstore.transfer.base import Region


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


def test_a_pool_larger_than_the_memory_there_is_is_not_made() -> None:
    available = available_memory()
    assert available is not None
    # Twice, because memory becomes free meanwhile; the kernel would map it.
    with pytest.raises(PoolError, match=r"slots: .* bytes of memory are available"):
        make_region(2 * available // PAGE, PAGE)


def resident(region: Region) -> int:
    """Bytes of the memfd that are there."""
    return os.fstat(region.fd).st_blocks * 512


def test_populating_takes_the_pages_and_keeps_what_is_in_them() -> None:
    region = make_region(16, 1024 * 1024)
    region.memory[5 * region.pitch] = 7
    assert resident(region) < region.pitch
    populate(region, lambda: True)
    assert resident(region) == 16 * region.pitch
    assert region.memory[5 * region.pitch] == 7


def test_populating_stops_between_two_pieces() -> None:
    region = make_region(16, 1024 * 1024)
    pieces = iter((True, False))
    populate(region, lambda: next(pieces))
    assert resident(region) == 8 * region.pitch

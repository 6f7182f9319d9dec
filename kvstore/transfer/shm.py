"""One host: the reader maps the owner's pool, read-only, and copies out of it.

The owner offers a descriptor of its memfd; whoever may trace the process (the same user, in the same PID namespace) can
open it under /proc. That is the permission that reading its memory in any other way takes, too, so a lease protects
nothing here that the kernel does not. Preferred over a cross-memory read of the same bytes, which has the kernel pin
every 4 KiB page: `python -m replica_agent.bench transfer` shows both. The owner's CPU has no part in it, so one that is
frozen or dead in the middle of a fetch does not end it: whether the bytes are good, the release of the lease decides.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvstore.errors import TransportUnavailable
from kvstore.peer_messages import Offer
from kvstore.transfer.base import Arrived, Authorize, Plan, Region, Result, Transport
from kvstore.transfer.host import host_identity
from kvstore.transfer.job import Job, Jobs, run, size_error

IDLE_S = 60.0
"""A mapping that no fetch uses for so long is dropped: it keeps the memory of an owner that died."""

_THREADS = 4


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a pool's memfd is: `host` names the boot and the PID namespace in which `pid` means something; `life` is
    random for each start; `device` and `inode` tell the memfd from another that came to the same number."""

    host: str
    pid: int
    fd: int
    life: bytes
    device: int
    inode: int
    pitch: int
    slots: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    @property
    def lives(self) -> bool:
        """Whether the owner still has this memfd open. Raises OSError where it cannot be looked at."""
        found = os.stat(self.path)
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class Shm(Transport):
    """Owns a read-only mapping for each owner it read from lately. The mappings are made and dropped on the event loop
    alone; one that is in use is never dropped."""

    name = "shm"

    def __init__(self) -> None:
        self._region: Region | None = None
        self._offer = b""
        self._host = ""
        self._views: dict[bytes, _View] = {}
        self._jobs = Jobs()
        self._threads = ThreadPoolExecutor(_THREADS, "shm")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def between_hosts(self) -> bool:
        return False

    async def start(self, region: Region, authorize: Authorize) -> None:
        try:
            self._host = host_identity()
            status = os.fstat(region.fd)
        except OSError as error:
            raise TransportUnavailable(f"shm: {error}", passes=True) from error
        self._region = region
        address = _Address(
            self._host,
            os.getpid(),
            region.fd,
            secrets.token_bytes(16),
            status.st_dev,
            status.st_ino,
            region.pitch,
            region.slots,
        )
        self._offer = msgspec.msgpack.encode(address)

    def offer(self) -> Offer:
        return Offer(transport=self.name, data=self._offer)

    def reaches(self, offer: Offer) -> bool:
        if offer.transport != self.name:
            return False
        try:
            address = msgspec.msgpack.decode(offer.data, type=_Address)
            return address.host == self._host and address.lives and os.access(address.path, os.R_OK)
        except (msgspec.MsgspecError, RecursionError, OSError):
            return False

    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        region = self._region
        assert region is not None, "started"
        try:
            address = msgspec.msgpack.decode(plan.offer.data, type=_Address)
            if why := size_error(address.pitch, region.pitch):
                return Result(0, True, why)
            view = self._view(address)
        except (msgspec.MsgspecError, RecursionError, OSError, ValueError) as error:
            return Result(0, True, f"the owner's pool cannot be mapped: {error}")
        loop = asyncio.get_running_loop()
        view.users += 1
        try:
            with self._jobs.begin(plan.deadline) as job:
                return await run(job, loop.run_in_executor(self._threads, _copy, view, region, plan, job, arrived))
        finally:
            view.users -= 1
            view.used = time.monotonic()
            self._sweep_later()

    def _view(self, address: _Address) -> _View:
        if not address.lives:
            raise ValueError("the owner is gone")
        view = self._views.get(address.life)
        if view is None:
            view = self._views[address.life] = _View(address)
        return view

    def _sweep_later(self) -> None:
        if self._timer is None and self._views:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = time.monotonic()
        for life, view in [*self._views.items()]:
            if not view.users and (now - view.used >= IDLE_S or not view.lives):
                del self._views[life]
                view.close()
        self._sweep_later()

    async def close(self) -> None:
        self._jobs.stop()
        await asyncio.to_thread(self._threads.shutdown)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for view in self._views.values():
            view.close()
        self._views.clear()

    def check(self) -> None:
        """While nothing is fetched: no mapping is in use, and one that could be dropped will be."""
        self._jobs.check(idle=True)
        assert not any(view.users for view in self._views.values())
        assert bool(self._views) == (self._timer is not None)


class _View:
    """An owner's pool in this process's memory, from `address` on, for reading. `users`: fetches that copy from it."""

    def __init__(self, owner: _Address) -> None:
        """Raises OSError, or ValueError for a file that is not what the offer says."""
        self.users = 0
        self.used = time.monotonic()
        self.slots = owner.slots
        self._owner = owner
        self._bytes = owner.pitch * owner.slots
        fd = os.open(owner.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (owner.device, owner.inode) or status.st_size < self._bytes:
                raise ValueError("it is not the file that was offered")
            # One that shrinks would kill us with SIGBUS.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it is not sealed against shrinking")
            # By way of libc, because the address of a read-only mmap object cannot be had from Python.
            found = _mmap(None, self._bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if found == _FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)
        self.address = int(found)

    @property
    def lives(self) -> bool:
        """Whether the owner is still there."""
        try:
            return self._owner.lives
        except OSError:
            return False

    def close(self) -> None:
        """Nobody may copy from it any more."""
        _munmap(self.address, self._bytes)


def _copy(view: _View, region: Region, plan: Plan, job: Job, arrived: Arrived) -> Result:
    pitch, ours, theirs, slots = region.pitch, region.address, view.address, view.slots
    for index, (source, target) in enumerate(plan.moves):
        if why := job.over():
            return Result(index, True, why)
        if not 0 <= source < slots:
            return Result(index, True, f"the owner has no slot {source}")
        # ctypes lets other threads run meanwhile; a slice assignment would not.
        ctypes.memmove(ours + target * pitch, theirs + source * pitch, pitch)
        arrived(index)
    return Result(len(plan.moves), True)


_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value

"""The NIXL agent of this process, and the one thread that calls it.

What was seen of NIXL 1.5 over UCX, and shapes this: a peer that hangs never times out by itself; a transfer that is
given up may still land, also after its handle was released; memory that was deregistered can still be read.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.bounds import U64, Count, Name
from kvstore.errors import TransferError, TransportUnavailable
from kvstore.transfer.base import Region, Result
from kvstore.transfer.host import has_rdma
from kvstore.transfer.job import Job

Steps = Generator[bool, None, Result]
"""A transfer in the making. Yields after each step whether there was something to do, or only to wait."""

CHUNK = 4
"""Slots of one posted transfer: few enough that they are still in the cache when they are reported."""

WINDOW = 4
"""Transfers posted ahead of the one that is waited for, so that a network does not idle between two."""

START_S = 60.0

MODULES = ("nixl_cu12._api", "nixl_cu13._api")
"""The wheels themselves: the `nixl` package in front of them imports torch in order to choose one."""

PEERS = 64
"""Connections kept; one more, and the one that was idle longest is given up."""

MAX_SLOTS = 1 << 24
"""Of a peer: NIXL takes 24 bytes for each of them when it connects."""

_POLL_S = 50e-6
_ORPHAN_S = 0.1
_PROGRESS_US = 1_000
"""How long NIXL's own progress thread rests. Its Python wrapper has it spin, at most of a core."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """How another NIXL agent finds this one's slots; `metadata` is NIXL's own."""

    name: Name
    metadata: bytes
    base: U64
    pitch: Count
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]


class Peer:
    """Another agent, connected: its slots as NIXL knows them, and how many moves use them. One that is `forgotten` is
    given back with its last user."""

    def __init__(self, address: Address, descriptors: Any) -> None:
        self.address = address
        self.descriptors = descriptors
        self.users = 0
        self.forgotten = False


class _Posted(msgspec.Struct):
    handle: Any
    count: int
    state: str


class NixlAgent:
    """Owns the NIXL agent, the registration of the pool, the peers, and the transfers that were given up while they
    could still land: their handles are kept until NIXL says that they are over. `open`, `close` and `submit` are for
    the event loop; all else belongs to the thread, `peer`, `move` and `notes` for the `Steps` that it takes."""

    def __init__(self, host: str) -> None:
        """`host`: where this agent is reached. On a loopback address UCX is told to listen nowhere else."""
        self._host = host
        self._users = 0
        self._region: Region | None = None
        self._started: Future[Address] = Future()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._inbox: queue.SimpleQueue[tuple[Steps, Future[Result]] | None] = queue.SimpleQueue()
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._orphans: list[_Posted] = []
        self._notes: dict[bytes, list[bytes]] = {}
        self._api: ModuleType
        self._agent: Any = None
        self._slots: Any = None

    def open(self, region: Region) -> Address:
        """Starts with its first user, and registers the region; takes a second. Raises TransportUnavailable."""
        self._users += 1
        if self._users == 1:
            self._region = region
            self._thread.start()
        try:
            return self._started.result(START_S)
        except Exception as error:
            raise TransportUnavailable(f"nixl: {str(error) or type(error).__name__}") from error

    def close(self) -> None:
        """The last user ends the thread. Blocks until all steps have ended."""
        self._users -= 1
        if self._users == 0:
            self._inbox.put(None)
            self._thread.join(START_S)

    def submit(self, steps: Steps) -> Future[Result]:
        """Have the thread take these steps, in turns with others."""
        future: Future[Result] = Future()
        self._inbox.put((steps, future))
        return future

    def check(self) -> None:
        """While no steps are taken: no peer is in use, no notes are waited for, and not too many peers are kept."""
        assert not any(peer.users for peer in self._peers.values())
        assert not self._notes
        assert len(self._peers) <= PEERS
        assert all(name == peer.address.name for name, peer in self._peers.items())

    def peer(self, address: Address) -> Peer:
        """Connects where it has to. Raises TransferError for an address that makes no sense to NIXL."""
        found = self._peers.get(address.name)
        if found is not None and found.address == address:
            self._peers.move_to_end(address.name)
            return found
        if found is not None:
            self.forget(found)
        with self._mapped():
            name = self._agent.add_remote_agent(address.metadata)
            if name not in (address.name, address.name.encode()):
                raise TransferError(f"the metadata is of {name!r}, not of {address.name!r}")
            found = Peer(address, self._describe(address.name, address))
        self._peers[address.name] = found
        if len(self._peers) > PEERS:
            idle = (peer for peer in self._peers.values() if not peer.users and peer is not found)
            if (oldest := next(idle, None)) is not None:
                self.forget(oldest)
        return found

    def forget(self, peer: Peer) -> None:
        """Disconnect, as soon as no move uses it any more; whoever needs it again connects anew."""
        if self._peers.get(peer.address.name) is peer:
            del self._peers[peer.address.name]
        if not peer.forgotten:
            peer.forgotten = True
            self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        # A move in the making would post its next chunk with descriptors that NIXL has freed.
        if peer.users or not peer.forgotten:
            return
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(peer.descriptors)
        if peer.address.name not in self._peers:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer.address.name)

    def move(
        self,
        operation: str,
        address: Address,
        ours: Sequence[int],
        theirs: Sequence[int],
        job: Job,
        moved: Callable[[int], None],
        note: Callable[[int], bytes] = lambda at: b"",
    ) -> Steps:
        """READ their slots into ours, or WRITE ours into theirs, in order. `moved` is told the index of each that has
        moved; `note` says what the peer is told when the chunk that begins at an index has."""
        if why := job.over():
            return Result(0, True, why)
        waiting: deque[_Posted] = deque()
        done = posted = 0
        peer = None
        gone = False
        try:
            peer = self.peer(address)
            peer.users += 1
            while done < len(ours) and not why:
                if len(waiting) < WINDOW and posted < len(ours):
                    chunk = slice(posted, posted + CHUNK)
                    waiting.append(self._post(operation, peer, ours[chunk], theirs[chunk], note(posted)))
                    posted += waiting[-1].count
                over = self._over(waiting[0])
                if over:
                    for index in range(done, done + waiting.popleft().count):
                        moved(index)
                        done = index + 1
                # After a chunk that moved at once, too: others have their turn.
                yield over or (len(waiting) < WINDOW and posted < len(ours))
                why = job.over()
        except TransferError as error:
            why = str(error)
            gone = isinstance(error.__cause__, self._api.nixlBind.nixlRemoteDisconnectError)
            if peer is not None:
                self.forget(peer)
        finally:
            if peer is not None:
                peer.users -= 1
                self._disconnect(peer)
            left = [each for each in waiting if not self._settled(each)]
            self._orphans += left
        return Result(done, gone or not left, "" if done == len(ours) else why)

    @contextlib.contextmanager
    def notes(self, tag: bytes) -> Iterator[Callable[[], list[bytes]]]:
        """While open: what peers noted under this tag (the first bytes of a note, without them) since last asked.
        Asking raises TransferError when NIXL does."""
        self._notes[tag] = []

        def take() -> list[bytes]:
            with self._mapped():
                news = self._agent.get_new_notifs()
            for notes in news.values():
                for note in notes:
                    if (mine := self._notes.get(note[: len(tag)])) is not None:
                        mine.append(note[len(tag) :])
            found, self._notes[tag] = self._notes[tag], []
            return found

        try:
            yield take
        finally:
            del self._notes[tag]

    def _run(self) -> None:
        try:
            self._started.set_result(self._create())
        except Exception as error:
            self._started.set_exception(error)
            return
        active: list[tuple[Steps, Future[Result]]] = []
        open_ = True
        while open_ or active:
            try:
                # Blocks only when there is nothing else to do, so an idle agent costs nothing here.
                taken = self._inbox.get(open_ and not active, _ORPHAN_S if self._orphans else None)
                if taken is None:
                    open_ = False
                elif taken[1].set_running_or_notify_cancel():
                    active.append(taken)
            except queue.Empty:
                pass
            stepped = [(each, self._step(*each)) for each in active]
            active = [each for each, step in stepped if step is not None]
            if active and not any(step for _, step in stepped):
                time.sleep(_POLL_S)
            elif not active:
                self._orphans = [each for each in self._orphans if not self._settled(each) and each.state != "ERR"]
        self._agent = self._slots = None

    @staticmethod
    def _step(steps: Steps, future: Future[Result]) -> bool | None:
        """One step: whether there was something to do; None when it was the last."""
        try:
            return next(steps)
        except StopIteration as stop:
            future.set_result(stop.value)
        except BaseException as error:
            future.set_exception(error)
        return None

    def _create(self) -> Address:
        """Raises anything: a missing wheel, a missing plugin, an address that UCX cannot listen on."""
        assert self._region is not None
        # Read by UCX and NIXL once, when they are loaded.
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        if _is_loopback(self._host) and not has_rdma():
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._api = _load()
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        config = self._api.nixl_agent_config(backends=["UCX"], enable_prog_thread=True)
        binding, make = self._api.nixlBind, self._api.nixlBind.nixlAgent

        def make_resting(name: str, config: Any) -> Any:
            config.pthrDelay = _PROGRESS_US
            return make(name, config)

        binding.nixlAgent = make_resting
        try:
            self._agent = self._api.nixl_agent(name, config)
        finally:
            binding.nixlAgent = make
        if "UCX" not in self._agent.backends:
            raise TransportUnavailable("the wheel has no UCX plugin")
        region = self._region
        self._agent.register_memory([(region.address, region.pitch * region.slots, 0, "")], "DRAM")
        address = Address(name, self._agent.get_agent_metadata(), region.address, region.pitch, region.slots)
        self._slots = self._describe("NIXL_INIT_AGENT", address)
        return address

    def _describe(self, name: str, address: Address) -> Any:
        """The slots of an agent as NIXL's list, in which a slot's number is its index."""
        numpy = importlib.import_module("numpy")
        slots = numpy.empty((address.slots, 3), dtype=numpy.uint64)
        slots[:, 0] = address.base + numpy.arange(address.slots, dtype=numpy.uint64) * address.pitch
        slots[:, 1] = address.pitch
        slots[:, 2] = 0
        return self._agent.prep_xfer_dlist(name, slots, "DRAM")

    def _post(self, operation: str, peer: Peer, ours: Sequence[int], theirs: Sequence[int], note: bytes) -> _Posted:
        with self._mapped():
            handle = self._agent.make_prepped_xfer(operation, self._slots, ours, peer.descriptors, theirs, note)
            return _Posted(handle, len(ours), self._agent.transfer(handle))

    def _over(self, posted: _Posted) -> bool:
        """Whether it has moved; its handle is given back then. Raises TransferError when it never will."""
        with self._mapped():
            if posted.state == "PROC":
                posted.state = self._agent.check_xfer_state(posted.handle)
            if posted.state == "ERR":
                raise TransferError("the transfer failed")
            if posted.state == "DONE":
                self._agent.release_xfer_handle(posted.handle)
        return posted.state == "DONE"

    def _settled(self, posted: _Posted) -> bool:
        """Whether nothing of it can land any more: it is done, or its peer is gone. Of an error nobody knows."""
        try:
            return self._over(posted)
        except TransferError as error:
            return isinstance(error.__cause__, self._api.nixlBind.nixlRemoteDisconnectError)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """NIXL's exceptions have no base of their own."""
        try:
            yield
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error


def _load() -> ModuleType:
    """By name, for NIXL is no declared dependency: what it declares brings CUDA. Raises ImportError."""
    for module in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    raise ImportError("no wheel of NIXL is installed; see `make install`")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The seam between an agent and whatever moves bytes.

A transport has two sides. As *owner* it describes how its pool can be reached (`offer`) and answers what a reader's
transport asks about one lease (`serve`). As *reader* it says whether it can use an offer (`reaches`) and moves slots of
a leased set into reserved slots of its own pool (`fetch`). It knows nothing of keys, checksums or decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.peer_messages import Offer


class Region(NamedTuple):
    """A pool's memory: `slots` of `pitch` bytes behind `fd` (a memfd), mapped at `address` as `memory`. Lives as long
    as the process; it is registered once and never freed, because deregistering revokes nothing at a peer. `tail` is
    memory behind the slots that peers neither read nor write."""

    fd: int
    memory: memoryview
    address: int
    pitch: int
    slots: int
    tail: memoryview = memoryview(b"")


class Move(NamedTuple):
    """Slot `source` of the owner's pool into slot `target` of one's own."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to move. `owner_host` is where the owner's agent answers; `deadline` is `time.monotonic()` seconds.

    `lease` and `secret` prove the right to read; `call` sends bytes to the owner's side of the same transport
    (`Transport.serve`) and returns its answer; it raises TransferError.
    """

    offer: Offer
    owner_host: str
    lease: str
    secret: bytes
    moves: Sequence[Move]
    deadline: float
    call: Callable[[bytes], Awaitable[bytes]]


class Result(NamedTuple):
    """The first `moved` of the plan's moves arrived whole. `stopped`: nothing more can land in any target; when False
    the targets of the others must be quarantined. `error` says why not all moved, empty when all did."""

    moved: int
    stopped: bool
    error: str = ""


class Grant(NamedTuple):
    """What the owner's side may serve for one lease: these slots, until `deadline` (`time.monotonic()` seconds)."""

    lease: str
    slots: frozenset[int]
    deadline: float


Authorize = Callable[[str, bytes], "Grant | None"]
"""Lease id and secret -> what may be read for them now; None for a lease that is unknown, over, or another's. Safe to
call from any thread."""

Arrived = Callable[[int], None]
"""Told, in order and from any one thread, the index of each move that has arrived whole: the bytes are still warm."""


class Transport(ABC):
    """One way to move slots. `start` once, `close` once; several `fetch`es at once; nothing blocks the event loop."""

    name: str

    @property
    def between_hosts(self) -> bool:
        """Whether a peer on another host could reach the pool by it, once started."""
        return True

    @abstractmethod
    async def start(self, region: Region, authorize: Authorize) -> None:
        """Make the region reachable. Raises TransportUnavailable where this host cannot; it can be tried again where
        that passes."""

    @abstractmethod
    def offer(self) -> Offer:
        """How a peer can reach this pool."""

    @abstractmethod
    def reaches(self, offer: Offer) -> bool:
        """Whether `fetch` can use an offer of this transport, as far as can be told without trying."""

    @abstractmethod
    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        """Move the slots in order until all are there, one fails, or the deadline passes. Cancelling ends it as soon
        as the targets are safe, or raises with them unsafe: then the caller quarantines them all. Raises nothing of
        its own: what goes wrong is in the result."""

    async def serve(self, grant: Grant, message: bytes) -> bytes:
        """The owner's answer to a reader's `Plan.call`. Raises TransferError; most transports need no such thing."""
        raise NotImplementedError(f"{self.name} has no owner side to call")

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and fetching. The region stays mapped."""

"""NIXL over UCX, in the two ways in which it is safe and fast.

`nixl` READs: within one host across memories, between hosts with RDMA. Neither takes the owner's CPU. `nixl-push` is
for anything else: the reader asks, the owner WRITEs, because a READ over TCP is emulated, slow, and can abort the
owner. It is here to be measured against own sockets (`python -m replica_agent.bench transfer`), and the last resort.

NIXL knows nothing of leases: whoever has the metadata can read the pool. All agents of a deployment trust each other.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.bounds import Seconds
from kvstore.errors import TransferError, TransportUnavailable
from kvstore.namespace import MAX_CONTENT_KEYS
from kvstore.peer_messages import Offer
from kvstore.transfer.base import Arrived, Authorize, Grant, Plan, Region, Result, Transport
from kvstore.transfer.host import has_rdma, host_identity, may_read_memory
from kvstore.transfer.job import Job, Jobs, run, size_error
from kvstore.transfer.nixl_agent import CHUNK, Address, NixlAgent, Steps

_TAG_BYTES = 8
_Slots = Annotated[list[int], Meta(max_length=MAX_CONTENT_KEYS)]


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """`host` and `pid` say whether it is on one's own host, `rdma` whether it can be read from another."""

    host: str
    pid: int
    rdma: bool
    address: Address


class _Push(msgspec.Struct, frozen=True, array_like=True):
    """Write `sources` into `targets` of the slots at `reader` within `seconds`; note each chunk under `tag`."""

    reader: Address
    sources: _Slots
    targets: _Slots
    tag: Annotated[bytes, Meta(min_length=_TAG_BYTES, max_length=_TAG_BYTES)]
    seconds: Seconds

    def note(self, at: int) -> bytes:
        """What is noted when the chunk that begins at this index of the slots has been written."""
        return self.tag + at.to_bytes(4, "little")


class _Pushed(msgspec.Struct, frozen=True, array_like=True):
    """The first `moved` were written, and nothing of the others can still land when `settled`."""

    moved: int
    settled: bool
    error: str


class Nixl(Transport):
    """Reads with NIXL. Shares the process's agent with `NixlPush`, which owns the pool's registration."""

    name = "nixl"

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._offer: _Offer | None = None
        self._jobs = Jobs()

    @property
    def between_hosts(self) -> bool:
        return self._offer is not None and self._offer.rdma

    async def start(self, region: Region, authorize: Authorize) -> None:
        try:
            host = host_identity()
        except OSError as error:
            raise TransportUnavailable(f"{self.name}: {error}", passes=True) from error
        address = await asyncio.to_thread(self._agent.open, region)
        self._offer = _Offer(host, os.getpid(), has_rdma(), address)

    def offer(self) -> Offer:
        return Offer(transport=self.name, data=msgspec.msgpack.encode(self._offer))

    def reaches(self, offer: Offer) -> bool:
        mine, theirs = self._offer, self._read(offer)
        if mine is None or theirs is None:
            return False
        if mine.host == theirs.host:
            return may_read_memory(theirs.pid)
        return mine.rdma and theirs.rdma

    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        theirs, why = self._usable(plan)
        if theirs is None:
            return Result(0, True, why)
        sources = [move.source for move in plan.moves]
        targets = [move.target for move in plan.moves]
        with self._jobs.begin(plan.deadline) as job:
            return await self._run(job, self._agent.move("READ", theirs, targets, sources, job, arrived))

    async def close(self) -> None:
        self._jobs.stop()
        await asyncio.to_thread(self._agent.close)

    def _read(self, offer: Offer) -> _Offer | None:
        try:
            return msgspec.msgpack.decode(offer.data, type=_Offer) if offer.transport == self.name else None
        except (msgspec.MsgspecError, RecursionError):
            return None

    def _usable(self, plan: Plan) -> tuple[Address | None, str]:
        """The owner's address, or why nothing of the plan can be moved."""
        assert self._offer is not None, "started"
        offer, pitch = self._read(plan.offer), self._offer.address.pitch
        if offer is None:
            return None, "the owner's address makes no sense"
        if why := size_error(offer.address.pitch, pitch):
            return None, why
        if any(not 0 <= move.source < offer.address.slots for move in plan.moves):
            return None, f"the owner has {offer.address.slots} slots"
        return offer.address, ""

    async def _run(self, job: Job, steps: Steps) -> Result:
        return await run(job, asyncio.wrap_future(self._agent.submit(steps)))

    def check(self) -> None:
        """While nothing is fetched: nothing is counted as if it were."""
        self._jobs.check(idle=True)
        self._agent.check()


class NixlPush(Nixl):
    """Has the owner write. What it writes can land for as long as it has not said that it is done."""

    name = "nixl-push"

    def reaches(self, offer: Offer) -> bool:
        return self._read(offer) is not None

    async def fetch(self, plan: Plan, arrived: Arrived) -> Result:
        theirs, why = self._usable(plan)
        if theirs is None or self._offer is None:
            return Result(0, True, why)
        with self._jobs.begin(plan.deadline) as job:
            if why := job.over():
                return Result(0, True, why)
            push = _Push(
                self._offer.address,
                [move.source for move in plan.moves],
                [move.target for move in plan.moves],
                secrets.token_bytes(_TAG_BYTES),
                job.remaining(),
            )
            arrivals = _Arrivals(len(plan.moves), push.tag, job, arrived)
            asked = asyncio.create_task(arrivals.ask(plan, msgspec.msgpack.encode(push)))
            try:
                result = await self._run(job, arrivals.steps(self._agent))
                if result.stopped:
                    # Its answer is about to come; to hang up would look like a reader that gave up.
                    await asyncio.wait([asked], timeout=job.remaining())
                return result
            finally:
                asked.cancel()

    async def serve(self, grant: Grant, message: bytes) -> bytes:
        assert self._offer is not None, "started"
        try:
            push = msgspec.msgpack.decode(message, type=_Push)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TransferError(f"not a push: {error}") from error
        if not grant.slots.issuperset(push.sources):
            raise TransferError("the lease does not name all of these slots")
        if push.reader.pitch != self._offer.address.pitch or len(push.sources) != len(push.targets):
            raise TransferError("the reader's slots are not like ours")
        if any(not 0 <= target < push.reader.slots for target in push.targets):
            raise TransferError(f"the reader has {push.reader.slots} slots")
        with self._jobs.begin(min(grant.deadline, time.monotonic() + push.seconds)) as job:
            steps = self._agent.move("WRITE", push.reader, push.sources, push.targets, job, _nothing, push.note)
            return msgspec.msgpack.encode(_Pushed(*await self._run(job, steps)))


class _Arrivals:
    """What has been written into the reader's slots, by the notes that follow each chunk, and what the owner says.
    `ask` runs on the event loop and only tells; `steps`, on the agent's thread, draws the conclusions."""

    def __init__(self, total: int, tag: bytes, job: Job, arrived: Arrived) -> None:
        self._total = total
        self._tag = tag
        self._job = job
        self._arrived = arrived
        self._told: _Pushed | None = None

    async def ask(self, plan: Plan, message: bytes) -> None:
        try:
            self._told = msgspec.msgpack.decode(await plan.call(message), type=_Pushed)
        except (TransferError, msgspec.MsgspecError, RecursionError) as error:
            self._job.stop(f"the owner failed: {error}")

    def steps(self, agent: NixlAgent) -> Steps:
        done = 0
        chunks: set[int] = set()
        with agent.notes(self._tag) as take:
            while True:
                told = self._told
                try:
                    found = take()
                except TransferError as error:
                    return Result(done, False, str(error))
                chunks.update(int.from_bytes(note, "little") for note in found)
                # In order, although the writes of two chunks may end in another.
                while done in chunks and done < self._total:
                    for index in range(done, min(done + CHUNK, self._total)):
                        self._arrived(index)
                        done = index + 1
                if done == self._total:
                    return Result(done, True)
                if told is not None and told.moved <= done:
                    return Result(done, told.settled, told.error or "the owner failed")
                if self._job.over():
                    return Result(done, False, self._job.over())
                yield bool(found)


def make_nixl(host: str) -> dict[str, Transport]:
    """Both, by name; `host` is where this process is reached."""
    agent = NixlAgent(host)
    return {transport.name: transport for transport in (Nixl(agent), NixlPush(agent))}


def _nothing(index: int) -> None:
    """The owner need not know."""

"""What other agents ask of this one before and after they take blocks out of its pool, however they reach it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvstore.bounds import MAX_TEXT, clipped
from kvstore.errors import PoolError
from kvstore.lease import Busy, Leases
from kvstore.namespace import unpack_content_keys
from kvstore.peer_frames import Verb
from kvstore.peer_messages import (
    Door,
    LeaseGrant,
    LeaseProof,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    LeaseTerm,
)
from kvstore.transfer.base import Grant
from replica_agent.errors import LeaseRequestBad
from replica_agent.kv.pool_keeper import PoolKeeper

_T = TypeVar("_T")


class LeaseService:
    """Answers over one pool, or none. Owns nothing but the `door` that its grants name; used on one event loop, and
    nothing takes longer than a few dictionary lookups for each block."""

    def __init__(self, keeper: PoolKeeper | None) -> None:
        self.keeper = keeper
        self.door: Door | None = None

    def answer(self, verb: Verb, lease: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer, as HTTP has it. Raises LeaseRequestBad."""
        if verb == "lease":
            granted = self._grant(_decode(body, LeaseRequest))
            return 409 if isinstance(granted, LeaseRefused) else 200, msgspec.msgpack.encode(granted)
        proof = _decode(body, LeaseProof)
        if verb == "renew":
            ttl_s = self._leases.renew(lease, proof.secret)
            if ttl_s is None:
                raise LeaseRequestBad(404, "no such lease, or it is over")
            return 200, msgspec.msgpack.encode(LeaseTerm(ttl_s=ttl_s))
        leases = self.keeper.leases if self.keeper else None
        held = leases is not None and leases.release(lease, proof.secret, copied=proof.copied)
        return 200, msgspec.msgpack.encode(LeaseRelease(held=held))

    def authorize(self, lease: str, secret: bytes) -> Grant:
        """What may be read for a lease now. Raises LeaseRequestBad."""
        granted = self._leases.authorize(lease, secret)
        if granted is None:
            raise LeaseRequestBad(404, "no such lease, or it is over")
        return granted

    def _grant(self, asked: LeaseRequest) -> LeaseGrant | LeaseRefused:
        keeper = self.keeper
        try:
            keys = unpack_content_keys(asked.keys)
        except ValueError as error:
            raise LeaseRequestBad(400, f"keys: {error}") from error
        if keeper is None or keeper.pool is None or keeper.leases is None or keeper.namespace is None:
            return LeaseRefused(code="no_engine", reason="no engine has connected to this agent's pool yet")
        different = keeper.namespace.differences(asked.namespace)
        if different:
            return LeaseRefused(code="namespace", reason=clipped("; ".join(different), MAX_TEXT))
        try:
            lease = keeper.leases.grant(asked.secret, keys, asked.ttl_s)
        except PoolError as error:
            raise LeaseRequestBad(400, str(error)) from error
        if isinstance(lease, Busy):
            return LeaseRefused(code="busy", reason=f"{lease.pinned} slots are pinned; the limit is {lease.limit}")
        offers = [each.offer() for each in keeper.transports if each.name in asked.transports]
        return LeaseGrant(
            lease=lease.id,
            ttl_s=max(0.0, lease.expires - keeper.clock()),
            slots=[held.slot for held in lease.held],
            generations=[held.generation for held in lease.held],
            pitch=keeper.pool.region.pitch,
            offers=offers,
            # Who may read the pool's memory may also come this way.
            door=self.door if any(offer.transport == "shm" for offer in offers) else None,
        )

    @property
    def _leases(self) -> Leases:
        if self.keeper is None or self.keeper.leases is None:
            raise LeaseRequestBad(404, "no such lease: no engine has connected to this agent's pool yet")
        return self.keeper.leases


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LeaseRequestBad(400, f"not a {kind.__name__}: {error}") from error

"""What one agent asks of another before and after it takes blocks out of its pool (HTTP, msgpack bodies).

    POST /v1/leases                 LeaseRequest -> 200 LeaseGrant | 409 LeaseRefused
    POST /v1/leases/{id}/renew      LeaseProof -> 200 LeaseTerm | 404
    POST /v1/leases/{id}/transfer   raw bytes of the transport in `?transport=`, with the proof in a header -> raw bytes
    POST /v1/leases/{id}/release    LeaseProof -> 200 LeaseRelease (held False for one that is unknown)

A lease pins the slots it names until it is released or its time is over. It is bound to the reader by `secret`, random
for each agent's life: who cannot prove it gets nothing. The reader believes what it read only after the release said,
by the owner's clock, that lease and generations held throughout; its own deadline is at most half of `ttl_s`.

Every length is bounded (`kvstore.bounds`), so that the largest grant fits into a frame of `kvstore.peer_frames`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.bounds import U64, Count, Name, Text
from kvstore.errors import ProtocolError
from kvstore.namespace import CONTENT_KEY_BYTES, MAX_CONTENT_KEYS, KvNamespace

SECRET_BYTES = 16
MAX_TRANSPORTS = 16
MAX_OFFER_BYTES = 65_536
"""NIXL's metadata, the longest there is, grows with a host's network devices."""

MAX_DOOR_BYTES = 108
"""As long as Linux lets the name of a Unix socket be."""

LeaseId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z_-]{0,64}\Z")]
"""It becomes part of a path."""

Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
Term = Annotated[float, Meta(ge=0, le=1e6)]
"""Seconds of a lease; finite."""

_Slot = Annotated[int, Meta(ge=0, lt=1 << 32)]

PROOF_HEADER = "x-lease-proof"
"""Carries the secret, in hex, where the body belongs to the transport."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How an owner's slots can be reached by one transport; `data` is that transport's own business."""

    transport: Name
    data: Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Where processes of the same user, on the host of this identity (`kvstore.transfer.host`), can ask for leases in
    frames (`kvstore.peer_frames`) instead: an abstract Unix socket of this name, random for each agent's life."""

    host: Name
    name: Annotated[bytes, Meta(max_length=MAX_DOOR_BYTES)]


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pin the longest run of `keys` that is held. `namespace` is the reader's, whole, so that a refusal can name the
    field that differs; `transports` the ones it can use, best first."""

    reader: Name
    secret: Secret
    request: Name
    namespace: KvNamespace
    keys: Annotated[bytes, Meta(max_length=CONTENT_KEY_BYTES * MAX_CONTENT_KEYS)]
    ttl_s: Annotated[float, Meta(gt=0, le=1e6)]
    transports: Annotated[list[Name], Meta(max_length=MAX_TRANSPORTS)]


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The first `len(slots)` blocks are pinned, each in a generation. No slots: none is held, and there is nothing to
    release. `door`: where the next may be asked for more quickly."""

    lease: LeaseId
    ttl_s: Term
    slots: Annotated[list[_Slot], Meta(max_length=MAX_CONTENT_KEYS)]
    generations: Annotated[list[U64], Meta(max_length=MAX_CONTENT_KEYS)]
    pitch: Count
    offers: Annotated[list[Offer], Meta(max_length=MAX_TRANSPORTS)]
    door: Door | None = None

    def check(self, asked: int) -> None:
        """Raises ProtocolError, naming the field, where this is no answer to who asked for so many blocks."""
        if len(self.slots) > asked:
            raise ProtocolError(f"slots: {len(self.slots)} for {asked} blocks")
        if len(self.generations) != len(self.slots):
            raise ProtocolError(f"generations: {len(self.generations)} for {len(self.slots)} slots")
        if self.slots and not self.lease:
            raise ProtocolError("lease: slots without one")


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True):
    """No lease: `code` is one of a bounded set of words (`namespace`, `no_engine`, `busy`), `reason` says more."""

    code: Name
    reason: Text


class LeaseProof(msgspec.Struct, frozen=True, kw_only=True):
    """Shows that the caller is the reader the lease was granted to. A release says how many of the blocks, from the
    first on, were `copied`: the owner may let go of these first; None stands for all."""

    secret: Secret
    copied: Count | None = None


class LeaseTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds the lease has from now on."""

    ttl_s: Term


class LeaseRelease(msgspec.Struct, frozen=True, kw_only=True):
    """`held`: lease and generations held, by the owner's clock, from grant to release."""

    held: bool

"""What one agent asks of another before and after it takes blocks out of its pool (HTTP, msgpack bodies).

    POST /v1/leases                 LeaseRequest -> 200 LeaseGrant | 409 LeaseRefused
    POST /v1/leases/{id}/renew      LeaseProof -> 200 LeaseTerm | 404
    POST /v1/leases/{id}/transfer   raw bytes of the transport in `?transport=`, with the proof in a header -> raw bytes
    POST /v1/leases/{id}/release    LeaseProof -> 200 LeaseRelease (held False for one that is unknown)

A lease pins the slots it names until it is released or its time is over. It is bound to the reader by `secret`, random
for each agent's life: who cannot prove it gets nothing. The reader believes what it read only after the release said,
by the owner's clock, that lease and generations held throughout; its own deadline is at most half of `ttl_s`.
"""

from __future__ import annotations

import msgspec

from kvstore.namespace import KvNamespace

PROOF_HEADER = "x-lease-proof"
"""Carries the secret, in hex, where the body belongs to the transport."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How an owner's slots can be reached by one transport; `data` is that transport's own business."""

    transport: str
    data: bytes


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Where processes of the same user, on the host of this identity (`kvstore.transfer.host`), can ask for leases in
    frames (`kvstore.peer_frames`) instead: an abstract Unix socket of this name, random for each agent's life."""

    host: str
    name: bytes


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pin the longest run of `keys` that is held. `namespace` is the reader's, whole, so that a refusal can name the
    field that differs; `transports` the ones it can use, best first; `secret` 16 bytes."""

    reader: str
    secret: bytes
    request: str
    namespace: KvNamespace
    keys: bytes
    ttl_s: float
    transports: list[str]


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The first `len(slots)` blocks are pinned. No slots: none is held, and there is nothing to release. `door`: where
    the next may be asked for more quickly."""

    lease: str
    ttl_s: float
    slots: list[int]
    generations: list[int]
    pitch: int
    offers: list[Offer]
    door: Door | None = None


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True):
    """No lease: `code` is one of a bounded set of words (`namespace`, `no_engine`, `busy`), `reason` says more."""

    code: str
    reason: str


class LeaseProof(msgspec.Struct, frozen=True, kw_only=True):
    """Shows that the caller is the reader the lease was granted to. A release says how many of the blocks, from the
    first on, were `copied`: the owner may let go of these first; None stands for all."""

    secret: bytes
    copied: int | None = None


class LeaseTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds the lease has from now on."""

    ttl_s: float


class LeaseRelease(msgspec.Struct, frozen=True, kw_only=True):
    """`held`: lease and generations held, by the owner's clock, from grant to release."""

    held: bool

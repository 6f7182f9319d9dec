"""What other agents ask of this one over HTTP: leases on blocks of its pool, and the owner's side of a transfer."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvstore.errors import PoolError, TransferError
from kvstore.lease import Busy, Leases
from kvstore.namespace import unpack_content_keys
from kvstore.peer_messages import (
    PROOF_HEADER,
    LeaseGrant,
    LeaseProof,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    LeaseTerm,
)
from replica_agent.kv.pool_keeper import PoolKeeper

MSGPACK = "application/msgpack"
MAX_BODY = 4 * 1024 * 1024
SECRET_BYTES = 16

_T = TypeVar("_T")


def lease_routes(keeper: PoolKeeper | None) -> list[Route]:
    """The four routes of `kvstore.peer_messages`, over one pool, or none. Everything is answered on the event loop:
    nothing here takes longer than a few dictionary lookups for each block."""

    async def grant(request: Request) -> Response:
        asked = _decode(await _body(request), LeaseRequest)
        try:
            keys = unpack_content_keys(asked.keys)
        except ValueError as error:
            raise HTTPException(400, f"keys: {error}") from error
        if len(asked.secret) != SECRET_BYTES:
            raise HTTPException(400, f"secret: expected {SECRET_BYTES} bytes, got {len(asked.secret)}")
        if keeper is None or keeper.pool is None or keeper.leases is None or keeper.namespace is None:
            return _refused("no_engine", "no engine has connected to this agent's pool yet")
        different = keeper.namespace.differences(asked.namespace)
        if different:
            return _refused("namespace", "; ".join(different))
        try:
            lease = keeper.leases.grant(asked.secret, keys, asked.ttl_s)
        except PoolError as error:
            raise HTTPException(400, str(error)) from error
        if isinstance(lease, Busy):
            return _refused("busy", f"{lease.pinned} slots are pinned; the limit is {lease.limit}")
        return _answer(
            LeaseGrant(
                lease=lease.id,
                ttl_s=max(0.0, lease.expires - keeper.clock()),
                slots=[held.slot for held in lease.held],
                generations=[held.generation for held in lease.held],
                pitch=keeper.pool.region.pitch,
                offers=[each.offer() for each in keeper.transports if each.name in asked.transports],
            )
        )

    async def renew(request: Request) -> Response:
        proof = _decode(await _body(request), LeaseProof)
        ttl_s = _leases(keeper).renew(request.path_params["lease"], proof.secret)
        if ttl_s is None:
            raise HTTPException(404, "no such lease, or it is over")
        return _answer(LeaseTerm(ttl_s=ttl_s))

    async def transfer(request: Request) -> Response:
        try:
            secret = bytes.fromhex(request.headers.get(PROOF_HEADER, ""))
        except ValueError as error:
            raise HTTPException(400, f"{PROOF_HEADER}: not hexadecimal") from error
        message = await _body(request)
        granted = _leases(keeper).authorize(request.path_params["lease"], secret)
        if granted is None:
            raise HTTPException(404, "no such lease, or it is over")
        name = request.query_params.get("transport", "")
        for transport in keeper.transports if keeper else ():
            if transport.name == name:
                try:
                    return Response(await transport.serve(granted, message), media_type="application/octet-stream")
                except (TransferError, NotImplementedError) as error:
                    raise HTTPException(409, str(error)) from error
        raise HTTPException(404, f"transport: there is no {name!r} here")

    async def release(request: Request) -> Response:
        proof = _decode(await _body(request), LeaseProof)
        leases = keeper.leases if keeper else None
        held = leases is not None and leases.release(
            request.path_params["lease"], proof.secret, copied=None if proof.copied is None else max(0, proof.copied)
        )
        return _answer(LeaseRelease(held=held))

    return [
        Route("/v1/leases", grant, methods=["POST"]),
        Route("/v1/leases/{lease}/renew", renew, methods=["POST"]),
        Route("/v1/leases/{lease}/transfer", transfer, methods=["POST"]),
        Route("/v1/leases/{lease}/release", release, methods=["POST"]),
    ]


def _leases(keeper: PoolKeeper | None) -> Leases:
    if keeper is None or keeper.leases is None:
        raise HTTPException(404, "no such lease: no engine has connected to this agent's pool yet")
    return keeper.leases


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a body has at most {MAX_BODY} bytes")
    return bytes(body)


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HTTPException(400, f"not a {kind.__name__}: {error}") from error


def _answer(message: object) -> Response:
    return Response(msgspec.msgpack.encode(message), media_type=MSGPACK)


def _refused(code: str, reason: str) -> Response:
    return Response(msgspec.msgpack.encode(LeaseRefused(code=code, reason=reason)), 409, media_type=MSGPACK)

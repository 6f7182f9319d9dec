"""What other agents ask of this one over HTTP: leases on blocks of its pool, and the owner's side of a transfer."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvstore.bounds import clipped
from kvstore.errors import TransferError
from kvstore.peer_frames import Verb
from kvstore.peer_messages import PROOF_HEADER
from replica_agent.errors import LeaseRequestBad
from replica_agent.kv.lease_service import LeaseService

MSGPACK = "application/msgpack"
MAX_BODY = 4 * 1024 * 1024


def lease_routes(service: LeaseService) -> list[Route]:
    """The four routes of `kvstore.peer_messages`. Everything is answered on the event loop."""

    async def answer(request: Request, verb: Verb) -> Response:
        body = await _body(request)
        try:
            status, told = service.answer(verb, request.path_params.get("lease", ""), body)
        except LeaseRequestBad as error:
            raise HTTPException(error.status, str(error)) from error
        return Response(told, status, media_type=MSGPACK)

    async def grant(request: Request) -> Response:
        return await answer(request, "lease")

    async def renew(request: Request) -> Response:
        return await answer(request, "renew")

    async def release(request: Request) -> Response:
        return await answer(request, "release")

    async def transfer(request: Request) -> Response:
        try:
            secret = bytes.fromhex(request.headers.get(PROOF_HEADER, ""))
        except ValueError as error:
            raise HTTPException(400, f"{PROOF_HEADER}: not hexadecimal") from error
        message = await _body(request)
        try:
            granted = service.authorize(request.path_params["lease"], secret)
        except LeaseRequestBad as error:
            raise HTTPException(error.status, str(error)) from error
        name = request.query_params.get("transport", "")
        for transport in service.keeper.transports if service.keeper else ():
            if transport.name == name:
                try:
                    return Response(await transport.serve(granted, message), media_type="application/octet-stream")
                except (TransferError, NotImplementedError) as error:
                    raise HTTPException(409, str(error)) from error
        raise HTTPException(404, f"transport: there is no {clipped(name)!r} here")

    return [
        Route("/v1/leases", grant, methods=["POST"]),
        Route("/v1/leases/{lease}/renew", renew, methods=["POST"]),
        Route("/v1/leases/{lease}/transfer", transfer, methods=["POST"]),
        Route("/v1/leases/{lease}/release", release, methods=["POST"]),
    ]


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a body has at most {MAX_BODY} bytes")
    return bytes(body)

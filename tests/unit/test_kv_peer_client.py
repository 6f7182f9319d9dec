"""The lease API of a real agent, and what a reader makes of peers that answer otherwise."""

from __future__ import annotations

import contextlib
import gzip
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from agent_support import DEADLINE_S, serving, until
from kv_support import HOLD_S, Agent, agent, hello, keys_of
from loopback_ports import free_port
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvstore.errors import TransferError
from kvstore.namespace import KvNamespace, pack_content_keys
from kvstore.peer_messages import (
    PROOF_HEADER,
    LeaseGrant,
    LeaseProof,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    LeaseTerm,
)
from kvstore.transfer.loopback import Network
from replica_agent.errors import PeerError
from replica_agent.kv.lease_api import MAX_BODY
from replica_agent.kv.peers import REFUSED_FOR_S, Peers

KEYS = keys_of(*range(4))
SECRET = b"s" * 16
GRANT = msgspec.msgpack.encode(LeaseGrant(lease="", ttl_s=1, slots=[], generations=[], pitch=1, offers=[]))


@contextlib.asynccontextmanager
async def reading(token: str | None = None, **more: Any) -> AsyncIterator[Peers]:
    peers = Peers(token, **more)
    try:
        yield peers
    finally:
        await peers.close()


def namespace(**more: Any) -> KvNamespace:
    facts = msgspec.structs.asdict(hello(**more))
    return KvNamespace(**{name: facts[name] for name in KvNamespace.__struct_fields__})


def asking(**more: Any) -> LeaseRequest:
    fields = {
        "reader": "me",
        "secret": SECRET,
        "request": "r",
        "namespace": namespace(),
        "keys": pack_content_keys(KEYS),
        "ttl_s": 10.0,
        "transports": ["loopback", "tcp"],
    }
    return LeaseRequest(**(fields | more))


async def leased(tmp_path: Path, peers: Peers, subject: Agent) -> LeaseGrant:
    await subject.connect()
    await subject.engine.save(KEYS)
    return await peers.lease(subject.url, asking(), DEADLINE_S)


async def test_a_lease_from_grant_to_release(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject, reading() as peers:
        grant = await leased(tmp_path, peers, subject)
        assert (len(grant.slots), grant.pitch, [offer.transport for offer in grant.offers]) == (4, 8_192, ["loopback"])
        assert 9 < grant.ttl_s <= 10
        assert subject.pool.counts.pinned == 4
        assert await peers.renew(subject.url, grant.lease, SECRET, DEADLINE_S) == 10
        for lease, secret in ((grant.lease, b"x" * 16), ("none", SECRET)):
            with pytest.raises(PeerError, match="status 404"):
                await peers.renew(subject.url, lease, secret, DEADLINE_S)
            assert not await peers.release(subject.url, lease, secret, None, DEADLINE_S)
            with pytest.raises(TransferError, match="status 404"):
                await peers.transfer(subject.url, lease, secret, "loopback", b"", DEADLINE_S)
        # This transport has no owner's side, and there is no other.
        for transport, status in (("loopback", 409), ("tcp", 404)):
            with pytest.raises(TransferError, match=f"status {status}"):
                await peers.transfer(subject.url, grant.lease, SECRET, transport, b"", DEADLINE_S)
        assert await peers.release(subject.url, grant.lease, SECRET, 4, DEADLINE_S)
        assert not await peers.release(subject.url, grant.lease, SECRET, 4, DEADLINE_S)
        await subject.quiet()


async def test_a_lease_that_nobody_releases_ends_and_its_slots_are_held(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject, reading() as peers:
        await subject.connect()
        await subject.engine.save(KEYS)
        grant = await peers.lease(subject.url, asking(ttl_s=0.01), DEADLINE_S)
        leases = subject.kv.keeper.leases
        assert leases is not None
        await until(lambda: leases.expired == 1)
        assert not await peers.release(subject.url, grant.lease, SECRET, None, DEADLINE_S)
        assert HOLD_S > 0
        await subject.quiet()


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (asking(namespace=namespace(dtype="float16")), "namespace", "dtype: 'float32' here, 'float16' there"),
        (asking(namespace=namespace(identity={"model": "m"})), "namespace", "weights: 'w' here, None there"),
        (asking(namespace=namespace(identity={"model": "m" * 16_384})), "namespace", "model: 'm' here, 'mmm"),
        (asking(secret=b"short"), "status", r"status 400.*\$\.secret"),
        (asking(keys=b"short"), "status", "status 400.*keys: "),
        (asking(keys=bytes(32 * 70_000)), "status", r"status 400.*\$\.keys"),
        (asking(ttl_s=-1.0), "status", r"status 400.*\$\.ttl_s"),
        (asking(ttl_s=float("nan")), "status", r"status 400.*\$\.ttl_s"),
        (asking(transports=["tcp"] * 17), "status", r"status 400.*\$\.transports"),
        (asking(request="r" * 513), "status", r"status 400.*\$\.request"),
    ],
)
async def test_a_request_that_cannot_be_met_is_refused(
    tmp_path: Path, request_: LeaseRequest, code: str, reason: str
) -> None:
    async with agent(tmp_path, Network()) as subject, reading() as peers:
        await subject.connect()
        await subject.engine.save(KEYS)
        with pytest.raises(PeerError, match=reason) as refused:
            await peers.lease(subject.url, request_, DEADLINE_S)
        assert refused.value.code == code
        await subject.quiet()


async def test_more_than_half_a_pool_is_not_lent(tmp_path: Path) -> None:
    async with agent(tmp_path, Network(), **{"pool-bytes": str(4 * 16_384)}) as subject, reading() as peers:
        await subject.connect()
        await subject.engine.save(keys_of(*range(8)))
        first = await peers.lease(subject.url, asking(), DEADLINE_S)
        with pytest.raises(PeerError, match="4 slots are pinned") as refused:
            await peers.lease(subject.url, asking(keys=pack_content_keys(keys_of(*range(4, 8)))), DEADLINE_S)
        assert (len(first.slots), refused.value.code) == (4, "busy")
        await peers.release(subject.url, first.lease, SECRET, 4, DEADLINE_S)
        await subject.quiet()


async def test_the_token_guards_the_leases(tmp_path: Path) -> None:
    async with agent(tmp_path, Network(), token="secret") as subject:
        for token, code in ((None, "unauthorized"), ("wrong", "unauthorized"), ("secret", "no_engine")):
            async with reading(token) as peers:
                with pytest.raises(PeerError) as refused:
                    await peers.lease(subject.url, asking(), DEADLINE_S)
                assert refused.value.code == code


async def test_without_a_pool_there_is_nothing_to_lease(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject, reading() as peers:
        with pytest.raises(PeerError) as refused:
            await peers.lease(subject.url, asking(), DEADLINE_S)
        assert refused.value.code == "no_engine"
        assert not await peers.release(subject.url, "none", SECRET, None, DEADLINE_S)
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.post(f"{subject.url}/v1/leases/x/transfer", headers={PROOF_HEADER: "zz"})
            assert (response.status_code, PROOF_HEADER in response.text) == (400, True)


class Odd:
    """A peer that answers every lease request in one odd way."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        self.paths.append(scope["path"])
        await self.response(scope, receive, send)

    @property
    def asked(self) -> int:
        return len(self.paths)


async def _drip() -> Any:
    yield b"x"


@pytest.mark.parametrize(
    ("response", "code", "remembered"),
    [
        (Response(b"no msgpack"), "nonsense", False),
        (Response(msgspec.msgpack.encode(LeaseTerm(ttl_s=1))), "nonsense", False),
        (StreamingResponse(_drip()), "nonsense", False),
        (Response(gzip.compress(GRANT), headers={"content-encoding": "gzip"}), "nonsense", False),
        (Response(b"", 500), "status", False),
        (Response(b"", 302, {"location": "http://127.0.0.1:1/"}), "status", False),
        (Response(b"?", 409), "status", False),
        (Response(msgspec.msgpack.encode(LeaseRefused(code="odd", reason="x")), 409), "status", False),
        (Response(msgspec.msgpack.encode(LeaseRefused(code="busy", reason="x")), 409), "busy", False),
        (Response(msgspec.msgpack.encode(LeaseRefused(code="namespace", reason="x")), 409), "namespace", True),
        (Response(b"", 401), "unauthorized", True),
    ],
)
async def test_what_a_peer_answers_becomes_one_word(response: Response, code: str, remembered: bool) -> None:
    now = [0.0]
    odd = Odd(response)
    async with serving(odd) as url, reading(clock=lambda: now[0]) as peers:
        for asked in (1, 1 if remembered else 2):
            with pytest.raises(PeerError) as refused:
                await peers.lease(url, asking(), DEADLINE_S)
            assert (refused.value.code, odd.asked) == (code, asked)
        # Another namespace is another question, and after a while it is the same one again.
        with pytest.raises(PeerError):
            await peers.lease(url, asking(namespace=namespace(dtype="float16")), DEADLINE_S)
        before = odd.asked
        now[0] += REFUSED_FOR_S.get(code, 0.0) + 1
        with pytest.raises(PeerError):
            await peers.lease(url, asking(), DEADLINE_S)
        assert odd.asked == before + 1


@pytest.mark.parametrize(
    ("lies", "field"),
    [
        ({"slots": [*range(5)], "generations": [1] * 5}, "slots: 5 for 4"),
        ({"generations": [1]}, "generations: 1 for 2"),
        ({"slots": [-1, 2]}, r"\$\.slots"),
        ({"lease": "x/../y"}, r"\$\.lease"),
    ],
)
async def test_a_grant_that_is_no_answer_is_named_and_given_back_where_it_can_be(
    lies: dict[str, Any], field: str
) -> None:
    fields = {"lease": "l", "ttl_s": 1.0, "slots": [1, 2], "generations": [1, 1], "pitch": 1, "offers": []}
    odd = Odd(Response(msgspec.msgpack.encode(fields | lies)))
    async with serving(odd) as url, reading() as peers:
        with pytest.raises(PeerError, match=field) as refused:
            await peers.lease(url, asking(), DEADLINE_S)
        assert refused.value.code == "nonsense"
        await until(lambda: not peers._background)
        assert odd.paths == ["/v1/leases"] + ["/v1/leases/l/release"] * field.startswith(("slots", "generations"))


async def test_a_peer_that_is_not_there() -> None:
    for url in (f"http://127.0.0.1:{free_port()}", "http://[bad", "http://no-such-host.invalid"):
        async with reading() as peers:
            with pytest.raises(PeerError) as refused:
                await peers.lease(url, asking(), DEADLINE_S)
            assert refused.value.code == "unreachable"
            with pytest.raises(PeerError):
                await peers.release(url, "x", SECRET, None, DEADLINE_S)


async def test_a_peer_that_says_nothing_costs_the_time_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with reading() as peers:
            for asked in (
                peers.lease(url, asking(), 0.05),
                peers.renew(url, "x", SECRET, 0.05),
                peers.release(url, "x", SECRET, None, 0.05),
            ):
                with pytest.raises(PeerError) as refused:
                    await asked
                assert refused.value.code == "timeout"


async def test_a_proof_without_a_count_is_understood(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        await subject.connect()
        await subject.engine.save(KEYS)
        async with httpx.AsyncClient(trust_env=False) as client:

            async def post(path: str, body: Any) -> httpx.Response:
                return await client.post(subject.url + path, content=msgspec.msgpack.encode(body))

            answer = await post("/v1/leases", asking())
            grant = msgspec.msgpack.decode(answer.content, type=LeaseGrant)
            answer = await post(f"/v1/leases/{grant.lease}/release", {"secret": SECRET})
            assert msgspec.msgpack.decode(answer.content, type=LeaseRelease).held
            assert (await post("/v1/leases", LeaseProof(secret=SECRET))).status_code == 400
            # It may hang up before all is sent.
            with contextlib.suppress(httpx.TransportError):
                assert (await post("/v1/leases", asking(keys=bytes(MAX_BODY)))).status_code == 413
        await subject.quiet()

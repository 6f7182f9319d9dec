"""The agents of other replicas: leases on blocks in their pools, over HTTP, or on one host in frames."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvstore.errors import ProtocolError, TransferError
from kvstore.namespace import CONTENT_KEY_BYTES
from kvstore.peer_frames import Tell, Verb
from kvstore.peer_messages import (
    PROOF_HEADER,
    Door,
    LeaseGrant,
    LeaseProof,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    LeaseTerm,
)
from kvstore.transfer.host import host_identity
from replica_agent.errors import PeerError
from replica_agent.kv.lease_channel import LeaseChannel
from replica_agent.tls import AgentTls

KEEPALIVE_S = 60.0
LATE_GRANT_S = 5.0
"""How long the answer to a lease request is waited for in the background, so that what it grants is given back."""

REFUSED_FOR_S = {"namespace": 30.0, "unauthorized": 30.0, "unreachable": 1.0, "no_engine": 1.0}
"""How long a peer that answered so is not asked again."""

_REFUSALS = frozenset({"namespace", "no_engine", "busy"})
_MAX_ANSWER = 16 * 1024 * 1024
_MAX_REMEMBERED = 1_024
MAX_CHANNELS = 64
"""Channels at once; who has one more is asked over HTTP."""

_OPEN_S = 1.0
_SHUT_S = 30.0
"""How long a door that did not open is not tried again."""

_AT_ONCE = 2**19

_T = TypeVar("_T")


class Peers:
    """Owns the connections to all peers, kept alive, and what they refused lately; used on one event loop.

    A peer whose grant names a door on this host is asked there from then on, as long as the channel lives, and over
    HTTP else.

    Every method raises PeerError with a bounded code. A lease request that nobody waits for any more goes on in the
    background, and what it grants is released: an owner would otherwise keep the slots until the lease is over.
    """

    def __init__(
        self, token: str | None, *, tls: AgentTls | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tls = tls
        # No peer of ours compresses, and of what another sends the length says what it takes here.
        self._token = token
        self._headers = {"accept-encoding": "identity"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._clock = clock
        self._opened: aiohttp.ClientSession | None = None
        self._refused: dict[tuple[str, bytes], tuple[float, PeerError]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._channels: dict[str, LeaseChannel] = {}
        self._shut: dict[str, tuple[bytes, float]] = {}
        self._host = ""
        with contextlib.suppress(OSError):
            self._host = host_identity()

    async def lease(self, url: str, request: LeaseRequest, timeout: float) -> LeaseGrant:
        """Blocks pinned at the agent at `url`, within `timeout` seconds."""
        place = url, request.namespace.digest
        until, error = self._refused.get(place, (0.0, None))
        if error is not None and until > self._clock():
            raise error
        asking = self._spawn(self._ask(url, "lease", "", request, LeaseGrant, LATE_GRANT_S))
        try:
            async with asyncio.timeout(timeout):
                grant = await asyncio.shield(asking)
        except TimeoutError:
            self._give_back_when_granted(asking, url, request.secret)
            raise PeerError("timeout", f"{url}: no lease within {timeout:.3f} s") from None
        except asyncio.CancelledError:
            self._give_back_when_granted(asking, url, request.secret)
            raise
        except PeerError as error:
            self._remember(place, error)
            raise
        try:
            grant.check(len(request.keys) // CONTENT_KEY_BYTES)
        except ProtocolError as error:
            self._give_back_when_granted(asking, url, request.secret)
            raise PeerError("nonsense", f"{url}: not a LeaseGrant: {error}") from error
        self._knock_at(url, grant.door)
        return grant

    async def renew(self, url: str, lease: str, secret: bytes, timeout: float) -> float:
        """Seconds that the lease has from now on."""
        answer = await self._ask(url, "renew", lease, LeaseProof(secret=secret), LeaseTerm, timeout)
        return answer.ttl_s

    async def transfer(
        self, url: str, lease: str, secret: bytes, transport: str, message: bytes, timeout: float
    ) -> bytes:
        """What the owner's side of `transport` answers. Raises TransferError, as `Plan.call` does."""
        place = f"{url}/v1/leases/{lease}/transfer?transport={transport}"
        try:
            return await self._post(place, message, timeout, {PROOF_HEADER: secret.hex()})
        except PeerError as error:
            raise TransferError(str(error)) from error

    async def release(self, url: str, lease: str, secret: bytes, copied: int | None, timeout: float) -> bool:
        """Ends a lease, of which the first `copied` blocks were taken; whether the owner says that it held."""
        proof = LeaseProof(secret=secret, copied=copied)
        return (await self._ask(url, "release", lease, proof, LeaseRelease, timeout)).held

    async def close(self) -> None:
        """Ends what is under way and closes the connections."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for channel in self._channels.values():
            channel.close()
        if self._opened is not None:
            await self._opened.close()

    def check(self) -> None:
        """Asserts what holds for each channel."""
        assert len(self._channels) <= MAX_CHANNELS
        for channel in self._channels.values():
            channel.check()

    @property
    def _session(self) -> aiohttp.ClientSession:
        # aiohttp wants a running loop, so the session is made when first used.
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=KEEPALIVE_S,
                    ttl_dns_cache=10,
                    ssl=True if self._tls is None else self._tls.client,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
            )
        return self._opened

    @property
    def _server_name(self) -> str | None:
        return None if self._tls is None else self._tls.server_name or None

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _give_back_when_granted(self, asking: asyncio.Task[LeaseGrant], url: str, secret: bytes) -> None:
        async def give_back() -> None:
            with contextlib.suppress(PeerError):
                grant = await asking
                if grant.slots:
                    await self.release(url, grant.lease, secret, 0, LATE_GRANT_S)

        self._spawn(give_back())

    def _remember(self, place: tuple[str, bytes], error: PeerError) -> None:
        seconds = REFUSED_FOR_S.get(error.code)
        if seconds is not None:
            if len(self._refused) >= _MAX_REMEMBERED:
                self._refused.clear()
            self._refused[place] = self._clock() + seconds, error

    def _ask(
        self, url: str, verb: Verb, lease: str, message: object, kind: type[_T], timeout: float
    ) -> Coroutine[Any, Any, _T]:
        """Where there is a channel, the question is on its way when this returns."""
        body = msgspec.msgpack.encode(message)
        path = "/v1/leases" if verb == "lease" else f"/v1/leases/{lease}/{verb}"
        answer: Awaitable[bytes] | None = None
        channel = self._channels.get(url)
        if channel is not None:
            with contextlib.suppress(ConnectionError, ProtocolError):
                answer = self._told(url, channel, channel.ask(verb, lease, body), timeout)
        return self._decoded(url + path, answer or self._post(url + path, body, timeout, {}), kind)

    async def _decoded(self, url: str, answer: Awaitable[bytes], kind: type[_T]) -> _T:
        data = await answer
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PeerError("nonsense", f"{url}: not a {kind.__name__}: {error}") from error

    async def _told(self, url: str, channel: LeaseChannel, asked: asyncio.Future[Tell], timeout: float) -> bytes:
        try:
            async with asyncio.timeout(max(timeout, 0.001)):
                tell = await asked
        except TimeoutError as error:
            if timeout >= LATE_GRANT_S:
                # Questions must not pile up in front of an owner that is frozen.
                channel.close()
            raise PeerError("timeout", f"{url}: no answer within {timeout:.3f} s") from error
        except ConnectionError as error:
            raise PeerError("unreachable", f"{url}: {error}") from error
        if tell.status != 200:
            raise _refusal(url, tell.status, tell.body)
        return tell.body

    def _knock_at(self, url: str, door: Door | None) -> None:
        """Have the next question asked there, if that can be."""
        if door is None or door.host != self._host:
            return
        self._channels = {its: channel for its, channel in self._channels.items() if channel.alive}
        if url in self._channels:
            return
        name, until = self._shut.get(url, (b"", 0.0))
        if len(self._channels) >= MAX_CHANNELS or (name == door.name and until > self._clock()):
            return

        async def open_channel() -> None:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_OPEN_S):
                    self._channels[url] = await LeaseChannel.open(door, self._token)
                    del self._shut[url]

        if len(self._shut) >= _MAX_REMEMBERED:
            self._shut.clear()
        # At the beginning, and so also while it is being opened.
        self._shut[url] = door.name, self._clock() + _SHUT_S
        self._spawn(open_channel())

    async def _post(self, url: str, body: bytes, timeout: float, headers: dict[str, str]) -> bytes:
        # In pieces, where sending all at once would keep the event loop.
        data = io.BytesIO(body) if len(body) > _AT_ONCE else body
        try:
            async with (
                asyncio.timeout(max(timeout, 0.001)),
                self._session.post(
                    url, data=data, headers=headers, allow_redirects=False, server_hostname=self._server_name
                ) as response,
            ):
                size = response.content_length
                if size is None or size > _MAX_ANSWER:
                    raise PeerError("nonsense", f"{url}: an answer of {size} bytes")
                answer = await response.read()
        except TimeoutError as error:
            raise PeerError("timeout", f"{url}: no answer within {timeout:.3f} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerError("unreachable", f"{url}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise _refusal(url, response.status, answer)
        return answer


def _refusal(url: str, status: int, data: bytes) -> PeerError:
    if status == 409:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            refused = msgspec.msgpack.decode(data, type=LeaseRefused)
            if refused.code in _REFUSALS:
                return PeerError(refused.code, f"{url}: {refused.reason:.500}")
    why = f": {data[:500].decode(errors='replace')}" if status == 400 else ""
    return PeerError("unauthorized" if status in (401, 403) else "status", f"{url}: status {status}{why}")

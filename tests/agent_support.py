"""What the agent's tests run it against: a publisher that speaks vLLM's event protocol, the HTTP pages of an engine, a
reader of report streams. Real sockets throughout."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import httpx
import msgspec
import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvstore.identity import Namespace, token_keys, unpack_keys
from kvstore.messages import (
    Cleared,
    Delta,
    FetchRecord,
    FrameReader,
    Heartbeat,
    Report,
    Snapshot,
    Stored,
    Tier,
    digest_of,
)
from replica_agent.app import create_app
from replica_agent.replica import Replica
from replica_agent.settings import Settings, load_settings

DEADLINE_S = 15.0
SEED = 7
MODEL = "m"


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]],
    what: str = "condition",
    *,
    within_s: float = DEADLINE_S,
) -> None:
    """Waits until the condition holds, looking again every few ms."""
    deadline = time.monotonic() + within_s
    while True:
        result = condition()
        if not isinstance(result, bool):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        await asyncio.sleep(0.01)


def tokens_of(block: int, size: int = 16) -> list[int]:
    """Distinct tokens for a numbered block."""
    return [block * 1000 + position for position in range(size)]


def stored(
    hashes: list[int | bytes], tokens: list[int], *, parent: int | bytes | None = None, size: int = 16, **more: Any
) -> dict[str, Any]:
    """A BlockStored as vLLM 0.24 and later encode it."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | more


def removed(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    """A BlockRemoved as vLLM 0.24 and later encode it."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | more


CLEARED = {"type": "AllBlocksCleared"}


def chain_of(blocks: Iterable[int], *, size: int = 16, model: str = MODEL, seed: int = SEED) -> list[int]:
    """RouteKeys, one per block, of the prompt made of numbered blocks."""
    tokens = [token for block in blocks for token in tokens_of(block, size)]
    return list(token_keys(Namespace(model).root(seed), tokens))[size // 16 - 1 :: size // 16]


class Publisher:
    """vLLM's ZmqEventPublisher: a PUB socket, a ring of the last batches, a ROUTER that replays them.

    One thread, as in vLLM: a batch is sent, then remembered; the ROUTER is served between batches and every few ms.
    `topic_in_replies` is the reply shape since 0.28.
    """

    def __init__(
        self,
        events_port: int,
        replay_port: int | None,
        *,
        ring: int = 10_000,
        topic_in_replies: bool = True,
        first_seq: int = 0,
        rank: int | None = 0,
    ) -> None:
        self._ring_size = ring
        self._topic_in_replies = topic_in_replies
        self._rank = rank
        self._seq = first_seq
        self._ring: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if replay_port is not None else None
        self.replays: list[int] = []
        try:
            self._bind(self._pub, events_port)
            if self._router is not None:
                self._bind(self._router, replay_port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int | None) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return
            except zmq.ZMQError:  # the last life's port may take a moment to be free
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def publish(self, *events: object, lose: bool = False, forget: bool = False, raw: bytes | None = None) -> int:
        """Publishes a batch. `lose`: it never reaches a subscriber; `forget`: the ring does not keep it."""
        payload = raw if raw is not None else msgspec.msgpack.encode([time.time(), list(events), self._rank])
        with self._lock:
            seq, self._seq = self._seq, self._seq + 1
            if not lose:
                self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
            if not forget:
                self._ring[seq] = payload
                while len(self._ring) > self._ring_size:
                    self._ring.popitem(last=False)
        return seq

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._router is None:
                self._stopping.wait()
                return
            if not self._router.poll(5):
                continue
            client, _, start = self._router.recv_multipart()
            with self._lock:
                first = int.from_bytes(start, "big")
                self.replays.append(first)
                topic = [b""] if self._topic_in_replies else []
                for seq, payload in self._ring.items():
                    if seq >= first:
                        self._router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
                self._router.send_multipart([client, b"", *topic, (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        """Ends this life, as kill -9 would: connections break, nothing is announced."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


class EngineStandIn:
    """The HTTP pages of an engine that the agent looks at: `/metrics`, `/v1/models`, `/version`."""

    def __init__(self) -> None:
        self.start_time = 1000.0
        self.running = 0
        self.waiting = 2
        self.resets = 0
        self.capacity = 1234
        self.root: str | None = None
        self.models = [{"id": MODEL, "root": None, "parent": None}]
        self.status = 200
        self.identified = 0
        """How often it was asked what it serves."""
        self.app = Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/version", self._version),
            ]
        )

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# HELP vllm:num_requests_running x\n"
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}.0\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}.0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
            f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{self.capacity}"}} 1.0\n'
            'vllm:prompt_tokens_total{engine="0",model_name="m"} 400.0\n'
            f'http_requests_total{{handler="/reset_prefix_cache",method="POST",status="2xx"}} {self.resets}.0\n'
            f"process_start_time_seconds {self.start_time}\n",
            self.status,
        )

    async def _models(self, request: Request) -> Response:
        self.identified += 1
        return JSONResponse({"data": [card | {"root": self.root} for card in self.models]})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def main_loop(self) -> None:
        # uvicorn's own looks ten times a second whether to stop: most of what a short test would wait for.
        while not self.should_exit:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """The app on a real port of 127.0.0.1; gives its URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started, "server start")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


def settings_for(engine: str, events_port: int, replay_port: int | None, **more: str) -> Settings:
    flags = {
        "engine": engine,
        "kv-events": f"tcp://127.0.0.1:{events_port}",
        "route-seed": str(SEED),
        "poll-interval": "0.05",
        "heartbeat-interval": "0.05",
    } | more
    if replay_port is not None:
        flags["kv-replay"] = f"tcp://127.0.0.1:{replay_port}"
    return load_settings([text for name, value in flags.items() for text in (f"--{name}", value)], {})


@contextlib.asynccontextmanager
async def agent_running(settings: Settings) -> AsyncIterator[tuple[Replica, str]]:
    """A whole agent in this process, on a free port; gives its replica and its URL."""
    replica = Replica(settings)
    async with serving(create_app(replica)) as url:
        following = asyncio.create_task(replica.run())
        try:
            yield replica, url
        finally:
            replica.hub.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class Mirror:
    """A gateway's side of a report stream: applies what it reads, and asserts that numbers and digests fit."""

    def __init__(self) -> None:
        self.epoch = -1
        self.seq = 0
        self.next_part: int | None = 0
        self.held: dict[Tier, dict[int, int]] = {}
        self.heartbeat: Heartbeat | None = None
        self.epochs: list[int] = []
        self.verified = 0
        self.fetches: list[FetchRecord] = []

    @property
    def hbm(self) -> set[int]:
        return set(self.held.get(Tier.HBM, {}))

    def apply(self, report: Report) -> None:
        if isinstance(report, FetchRecord):
            self.fetches.append(report)
            return
        assert report.epoch >= self.epoch, "an epoch never goes back"
        if isinstance(report, Snapshot):
            if report.part == 0:
                self.held = {tier: {} for tier in Tier}
                self.epoch, self.seq, self.next_part = report.epoch, report.seq, 0
                self.epochs.append(report.epoch)
            assert (report.epoch, report.seq, report.part) == (self.epoch, self.seq, self.next_part)
            self.next_part = None if report.last else report.part + 1
            for change in report.stored:
                self._store(change)
            return
        assert report.epoch == self.epoch, "a new epoch begins with a snapshot"
        if isinstance(report, Delta):
            assert report.seq == self.seq + 1
            self.seq = report.seq
            for change in report.changes:
                if isinstance(change, Stored):
                    self._store(change)
                elif isinstance(change, Cleared):
                    self.held[change.tier] = {}
                else:
                    for key in unpack_keys(change.keys):
                        del self.held[change.tier][key]
            return
        assert report.seq == self.seq
        self.heartbeat = report
        if self.next_part is not None:
            return
        assert report.blocks == sum(map(len, self.held.values()))
        assert report.digest == sum(digest_of(keys, tier) for tier, keys in self.held.items()) & (2**64 - 1)
        self.verified += 1

    def _store(self, change: Stored) -> None:
        tier = self.held[change.tier]
        keys = unpack_keys(change.keys)
        assert not tier.keys() & set(keys), "what is held is not told again"
        tier.update(zip(keys, unpack_keys(change.parents), strict=True))


@contextlib.asynccontextmanager
async def mirroring(url: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[Mirror]:
    """A mirror that follows `/v1/reports` of the agent at `url`; a broken rule of the protocol fails the test."""
    mirror = Mirror()

    async def follow() -> None:
        async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
            while True:  # an agent hangs up when it has to be greeted again
                try:
                    stream = await client.send(
                        client.build_request("GET", f"{url}/v1/reports", headers=headers), stream=True
                    )
                except httpx.TransportError:
                    if mirror.verified:
                        return  # it has ended
                    raise
                async with contextlib.aclosing(stream) as response:
                    assert response.status_code == 200
                    reader = FrameReader()
                    async for data in response.aiter_raw():
                        for report in reader.feed(data):
                            mirror.apply(report)

    task = asyncio.create_task(follow())
    try:
        await until(lambda: task.done() or mirror.verified > 0, "first heartbeat")
        yield mirror
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

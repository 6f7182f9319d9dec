"""Following an agent over real HTTP: the index is what the agent reports, or empty, and an operator is told why.

The agent is a stand-in that says what a test wants said; its frames are the protocol's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import msgspec
import pytest
import report_support
from agent_support import serving, until
from fetch_support import record
from loopback_ports import free_port
from report_support import removed, stored
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.fleet import report_stream, turns
from gateway.fleet.replica import Replica
from gateway.fleet.report_stream import ReportStream
from gateway.fleet.turns import Turns
from gateway.placement import blocks, holders, holdings
from gateway.placement.index import PrefixIndex
from gateway.placement.placement import Claims
from gateway.settings import ReplicaSettings
from kvstore.cost import LinkEstimate
from kvstore.identity import Namespace
from kvstore.messages import (
    MAX_REPLICA_BLOCKS,
    PROTOCOL_VERSION,
    Change,
    Cleared,
    Delta,
    FetchRecord,
    FetchState,
    Heartbeat,
    Hello,
    ModelFiles,
    Report,
    Snapshot,
    Stored,
    Tier,
    encode_frame,
)

SEED = 5
HELLO = Hello(
    replica_id="r",
    epoch=1,
    engine="vllm",
    engine_version="0.32.0",
    engine_up=True,
    models=["m"],
    block_size=16,
    capacity_blocks=100,
    geometry=None,
    identity_modes=["text"],
    route_seed_check=Namespace("").root(SEED),
)
FILES = ModelFiles(model="m", tokenizer_json=b"{}", chat_template=None, special_tokens={}, digest="d")


def snapshot(epoch: int, seq: int, keys: Iterable[int], *more: Stored, part: int = 0, last: bool = True) -> Report:
    return Snapshot(epoch=epoch, seq=seq, part=part, last=last, stored=[stored(*keys), *more])


def delta(epoch: int, seq: int, *changes: Change) -> Report:
    return Delta(epoch=epoch, seq=seq, changes=list(changes))


def beat(epoch: int, seq: int, *held: tuple[Tier, Iterable[int]], **fields: Any) -> Heartbeat:
    return report_support.beat(epoch, seq, *held, **{"running": 1, "kv_usage": 0.5, "capacity_blocks": 77} | fields)


class Agent:
    """Says `hello`, then on every report stream `opening`, then what is put into `say` (None closes the stream)."""

    def __init__(self) -> None:
        self.hello = msgspec.structs.replace(HELLO)
        self.raw_hello: bytes | None = None
        self.opening: list[Report] = []
        self.raw_opening: bytes | None = None
        self.token = ""
        self.reports_answer: Response | None = None
        self.streams = 0
        self._saying: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.app = Starlette(
            routes=[
                Route("/v1/hello", self._hello),
                Route("/v1/model-files", self._files),
                Route("/v1/reports", self._reports),
            ]
        )

    def say(self, *reports: Report) -> None:
        self._saying.put_nowait(b"".join(map(encode_frame, reports)))

    def say_raw(self, data: bytes | None) -> None:
        self._saying.put_nowait(data)

    def _refusal(self, request: Request) -> Response | None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": {"code": "invalid_token", "message": "asks for the token"}}, 401)
        return None

    async def _hello(self, request: Request) -> Response:
        return self._refusal(request) or Response(self.raw_hello or msgspec.json.encode(self.hello))

    async def _files(self, request: Request) -> Response:
        return self._refusal(request) or Response(msgspec.msgpack.encode(FILES))

    async def _reports(self, request: Request) -> Response:
        return (
            self._refusal(request)
            or self.reports_answer
            or StreamingResponse(self._frames(), media_type="application/octet-stream")
        )

    async def _frames(self) -> AsyncIterator[bytes]:
        self.streams += 1
        saying = self._saying = asyncio.Queue()
        yield b"".join(map(encode_frame, self.opening)) if self.raw_opening is None else self.raw_opening
        while (data := await saying.get()) is not None:
            yield data


class Gateway:
    """What follows the agent, and what it has learned."""

    def __init__(self, url: str, client: httpx.AsyncClient, token: str) -> None:
        self.replica = Replica(ReplicaSettings(id="r", engine="http://127.0.0.1:1", agent=url, dp_rank=0))
        self.index = PrefixIndex()
        self.index.add_replica("r")
        self.index.add_replica("other")
        self.index.store("other", Tier.HBM, [1, 2], [0, 1])
        self.hellos: list[Hello] = []
        self.files: list[ModelFiles] = []
        self.fetched: list[FetchRecord] = []
        self.begun: list[int] = []
        assert self.replica.agent is not None
        self.stream = ReportStream(
            self.replica,
            self.replica.agent,
            self.index,
            client,
            token=token,
            route_seed=SEED,
            on_hello=lambda _, hello: self.hellos.append(hello),
            on_model_files=self._learn,
            on_fetch=self.fetched.append,
            on_reporting=lambda replica: self.begun.append(self.index.reported_blocks(replica.id, Tier.HBM)),
        )

    async def _learn(self, replica: Replica, files: ModelFiles) -> None:
        self.files.append(files)

    def held(self, tier: Tier = Tier.HBM) -> set[int]:
        """What this replica is credited with; the other one's share must be as it was."""
        self.index.check()
        assert set(self.index.keys_of("other", Tier.HBM)) == {1, 2}
        return set(self.index.keys_of("r", tier))

    async def reports(self, keys: Iterable[int] = (), tier: Tier = Tier.HBM) -> None:
        wanted = set(keys)
        await until(lambda: self.replica.reporting and self.held(tier) == wanted, f"reporting {wanted}")

    async def refuses(self, *words: str) -> None:
        """Not reporting, holding nothing, and the reason names these words."""
        await until(lambda: all(word in self.replica.agent_error for word in words), f"an error with {words}")
        assert not self.replica.reporting
        assert not any(self.held(tier) for tier in Tier)


@contextlib.asynccontextmanager
async def followed(url: str, token: str = "") -> AsyncIterator[Gateway]:
    async with httpx.AsyncClient(trust_env=False) as client:
        gateway = Gateway(url, client, token)
        following = asyncio.create_task(gateway.stream.follow())
        try:
            yield gateway
            assert not following.done(), "following never ends by itself"
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def pair(set_up: Callable[[Agent], object] | None = None) -> AsyncIterator[tuple[Agent, Gateway]]:
    """An agent and a gateway that follows it: an agent as `set_up` makes it, or one that holds nothing."""
    agent = Agent()
    agent.opening = [snapshot(1, 0, []), beat(1, 0)]
    if set_up is not None:
        set_up(agent)
    async with serving(agent.app) as url, followed(url) as gateway:
        if set_up is None:
            await gateway.reports([])
        yield agent, gateway


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in sends no heartbeats of its own."""
    monkeypatch.setattr(report_stream, "SILENCE_S", 60.0)
    monkeypatch.setattr(report_stream, "UNVOUCHED_S", 60.0)


async def test_a_snapshot_in_parts_over_tiers_then_deltas() -> None:
    def opening(agent: Agent) -> None:
        agent.opening = [
            snapshot(9, 4, [10, 11], last=False),
            snapshot(9, 4, [12], stored(10, 13, tier=Tier.NVME), part=1),
            beat(9, 4, (Tier.HBM, [10, 11, 12]), (Tier.NVME, [10, 13])),
        ]

    async with pair(opening) as (agent, gateway):
        await gateway.reports([10, 11, 12])
        assert gateway.held(Tier.NVME) == {10, 13}
        assert (gateway.replica.agent_error, gateway.replica.hello) == ("", agent.hello)
        assert gateway.hellos == [agent.hello]
        agent.say(delta(9, 5, stored(14), removed(10, tier=Tier.NVME)), delta(9, 6, removed(10, 12), stored(10)))
        agent.say(beat(9, 6, (Tier.HBM, [10, 11, 14]), (Tier.NVME, [13])))
        await gateway.reports([10, 11, 14])
        assert gateway.held(Tier.NVME) == {13}
        await until(lambda: gateway.replica.heartbeat is not None and gateway.replica.heartbeat.seq == 6)
        assert gateway.replica.capacity_blocks == 77
        assert (gateway.stream.snapshots, gateway.stream.losses, agent.streams) == (1, {}, 1)


class Watch:
    """A listener of the index that notes how many blocks each change has, and how often others had their turn."""

    def __init__(self, gateway: Gateway) -> None:
        self.turns = 0
        self.gateway = gateway
        self.changes: list[tuple[bool, int, bool]] = []
        self.just_now: list[list[int]] = []
        self.turns_at: list[int] = []

    def replica_added(self, replica: str, bit: int) -> None: ...

    def replica_removed(self, replica: str, bit: int) -> None: ...

    def holders_changed(self, change: holders.Change) -> None:
        self.changes.append((change.gained, change.keys.size, self.gateway.replica.reporting))
        if change.parents is not None:
            self.just_now.append(change.keys.tolist())
        self.turns_at.append(self.turns)

    async def take_turns(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


async def test_a_large_snapshot_leaves_others_their_turn_and_so_does_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, holdings, report_stream):
        monkeypatch.setattr(module, "PIECE_BLOCKS", 10)
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    many = list(range(10, 45))
    async with pair() as (agent, gateway):
        watch = Watch(gateway)
        gateway.index.add_listener(watch)
        others = asyncio.create_task(watch.take_turns())
        agent.say(snapshot(2, 0, many), beat(2, 0, (Tier.HBM, many)))
        await gateway.reports(many)
        assert watch.changes == [(True, 10, False)] * 3 + [(True, 5, False)], "not credited before it is whole"
        assert len(set(watch.turns_at)) == 4
        agent.opening = [snapshot(3, 0, []), beat(3, 0)]
        watch.changes, watch.turns_at = [], []
        agent.say(beat(2, 0, digest=1))
        await gateway.reports([])
        assert watch.changes == [(False, 10, False)] * 3 + [(False, 5, False)], "nor after it is lost"
        assert len(set(watch.turns_at)) == 4
        others.cancel()


async def test_deltas_that_arrive_together_are_applied_together_and_in_order() -> None:
    async with pair() as (agent, gateway):
        watch = Watch(gateway)
        gateway.index.add_listener(watch)
        together = [delta(1, 1, stored(10)), delta(1, 2, stored(11, 12)), delta(1, 3, removed(11), stored(13))]
        agent.say_raw(b"".join(encode_frame(each) for each in [*together, beat(1, 3, (Tier.HBM, [10, 12, 13]))]))
        await gateway.reports([10, 12, 13])
        assert watch.changes == [(True, 3, True), (False, 1, True), (True, 1, True)]
        assert gateway.stream.losses == {}


async def test_only_what_deltas_tell_is_said_to_be_stored_just_now() -> None:
    async with pair() as (agent, gateway):
        watch = Watch(gateway)
        gateway.index.add_listener(watch)
        agent.say(delta(1, 1, stored(10, 11)), beat(1, 1, (Tier.HBM, [10, 11])))
        await gateway.reports([10, 11])
        agent.say(snapshot(2, 0, [10], last=False), snapshot(2, 0, [11, 12], part=1), delta(2, 1, stored(13)))
        agent.say(beat(2, 1, (Tier.HBM, [10, 11, 12, 13])))
        await gateway.reports([10, 11, 12, 13])
        assert watch.just_now == [[10, 11], [13]]


async def test_nothing_is_credited_before_a_snapshot_is_whole() -> None:
    def opening(agent: Agent) -> None:
        agent.opening = [snapshot(1, 0, [10], last=False)]

    async with pair(opening) as (agent, gateway):
        await until(lambda: gateway.replica.agent_error == "receiving a snapshot")
        agent.say(beat(1, 0, digest=99))
        await until(lambda: gateway.replica.heartbeat is not None and gateway.replica.heartbeat.digest == 99)
        assert gateway.replica.capacity_blocks == 77, "load and capacity are known at once"
        agent.say(snapshot(1, 0, [11], part=1, last=False), delta(1, 1, removed(10), stored(12)))
        agent.say(snapshot(1, 1, [13], part=2), delta(1, 2, stored(14)))
        await until(lambda: gateway.held() == {11, 12, 13, 14})
        assert not gateway.replica.reporting, "whole, but nobody has confirmed it"
        agent.say(beat(1, 2, (Tier.HBM, [11, 12, 13, 14])))
        await gateway.reports([11, 12, 13, 14])
        assert gateway.stream.losses == {}


async def test_a_tier_that_is_cleared_is_empty_and_the_others_are_not() -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10, 11), stored(10, tier=Tier.DRAM)))
        await gateway.reports([10, 11])
        agent.say(
            delta(1, 2, stored(12), Cleared(tier=Tier.HBM), stored(13)), beat(1, 2, (Tier.HBM, [13]), (Tier.DRAM, [10]))
        )
        await gateway.reports([13])
        assert (gateway.held(Tier.DRAM), gateway.stream.losses) == ({10}, {})


@pytest.mark.parametrize("limit", ["MAX_CHANGED_BLOCKS", "MAX_REPLICA_BLOCKS"])
@pytest.mark.parametrize("in_snapshot", [False, True])
async def test_more_blocks_than_may_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, in_snapshot: bool
) -> None:
    monkeypatch.setattr(report_stream, limit, 4)
    async with pair() as (agent, gateway):
        many = stored(*range(10, 15))
        say: list[Report] = [delta(1, 1, many), delta(1, 2, stored(1))]
        if in_snapshot:
            say = [Snapshot(epoch=2, seq=0, part=0, last=False, stored=[many]), snapshot(2, 0, [1], part=1)]
        agent.say(*say)
        await gateway.refuses("blocks", "the limit is 4")
        await until(lambda: gateway.stream.losses.get("protocol") == 1)
        await gateway.reports([])


async def test_a_capacity_that_cannot_be_reported_is_not_believed() -> None:
    """What is remembered of a replica's cache is as long as the cache is said to be."""
    async with pair() as (agent, gateway):
        agent.say(msgspec.structs.replace(beat(1, 0), capacity_blocks=1 << 53))
        await until(lambda: gateway.replica.capacity_blocks == MAX_REPLICA_BLOCKS)


async def test_a_new_epoch_on_the_same_stream_replaces_everything() -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10, 11)))
        await gateway.reports([10, 11])
        agent.say(snapshot(2, 0, []), beat(2, 0))
        await gateway.reports([])
        agent.say(delta(2, 1, stored(12)))
        await gateway.reports([12])
        # A snapshot that is overtaken by a newer one while it is being sent is dropped.
        agent.say(snapshot(3, 0, [1, 2, 3], last=False), snapshot(4, 0, [20]), beat(4, 0, (Tier.HBM, [20])))
        await gateway.reports([20])
        assert (agent.streams, gateway.stream.losses) == (1, {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([delta(1, 2, stored(11))], ["gap", "1/1"]),
        ([delta(2, 1, stored(11))], ["gap", "2/1"]),
        ([beat(1, 1, (Tier.HBM, []))], ["gap", "heartbeat", "1/1"]),
        ([delta(1, 1, stored(11)), delta(1, 1, stored(11))], ["gap"]),
        ([delta(1, 1, stored(11)), beat(1, 1, (Tier.HBM, [12]))], ["digest"]),
        ([snapshot(2, 0, [1], part=1), beat(2, 0)], ["gap", "expected part None", "got 1 of 2/0"]),
        ([snapshot(2, 0, [1], last=False), snapshot(2, 0, [2], part=2)], ["gap", "expected part 1", "got 2 of 2/0"]),
        ([snapshot(2, 0, [1], last=False), snapshot(2, 1, [2], part=1)], ["gap", "2/0", "got 1 of 2/1"]),
        ([snapshot(2, 0, [1], last=False), delta(2, 2)], ["gap", "2/1", "2/2"]),
        ([snapshot(2, 0, [1], last=False), beat(2, 1)], ["gap", "heartbeat", "2/1"]),
        ([delta(1, 1, Stored(tier=Tier.HBM, keys=bytes(16), parents=bytes(8)))], ["2 keys but 1 parents"]),
        ([delta(1, 1, Stored(tier=Tier.HBM, keys=b"x", parents=b""))], ["multiple of 8"]),
    ],
    ids=[
        "skipped",
        "epoch",
        "heartbeat ahead",
        "twice",
        "digest",
        "part missing",
        "part skipped",
        "delta missed",
        "delta skipped",
        "heartbeat early",
        "uneven",
        "cut key",
    ],
)
async def test_what_does_not_fit_empties_and_starts_over(wrong: list[Report], words: list[str]) -> None:
    async with pair() as (agent, gateway):
        agent.opening = [snapshot(1, 1, [11]), beat(1, 1, (Tier.HBM, [11]))]
        seen: list[str] = []
        report_lost = gateway.stream._lost

        async def lost(why: str, kind: str) -> None:
            await report_lost(why, kind)
            assert gateway.held() == set()
            assert not gateway.replica.reporting
            seen.append(gateway.replica.agent_error)

        gateway.stream._lost = lost  # type: ignore[method-assign]
        agent.say(*wrong)
        await until(lambda: bool(seen), "a loss")
        await gateway.reports([11])
        assert len(seen) == 1
        assert all(word in seen[0] for word in words), seen
        assert gateway.stream.snapshots == 2
        assert agent.streams == 2


async def test_fetch_records_and_the_state_of_the_pool_are_passed_on() -> None:
    async with pair() as (agent, gateway):
        first, second = (record(replica="r", gateway_request=request) for request in ("a", "b"))
        agent.say(first, delta(1, 1, stored(10)), second)
        await until(lambda: gateway.fetched == [first, second])
        await gateway.reports([10])
        state = FetchState(namespace="n", acts=True, slots=5, link=LinkEstimate(0.01, 1e9), links={})
        agent.say(msgspec.structs.replace(beat(1, 1, (Tier.HBM, [10])), fetch=state))
        await until(lambda: gateway.replica.fetch == state)
        view = gateway.replica.view(Claims.REPORTS, 1, 1000.0)
        assert (view.fetch, view.block_bytes) == (state, 0)
        assert gateway.stream.losses == {}
        agent.say(record(replica="somebody else"))
        await until(lambda: agent.streams == 2)
        await gateway.reports([])
        assert gateway.stream.losses == {"protocol": 1}
        assert len(gateway.fetched) == 2


async def test_a_pool_is_nothing_while_the_reports_are_not_followed() -> None:
    state = FetchState(namespace="n", acts=True, slots=5, link=LinkEstimate(0.01, 1e9), links={})
    async with pair() as (agent, gateway):
        agent.say(msgspec.structs.replace(beat(1, 0), fetch=state))
        await until(lambda: gateway.replica.fetch == state)
        agent.reports_answer = JSONResponse({}, 503)
        agent.say_raw(None)
        await gateway.refuses("503")
        assert gateway.replica.fetch is None


@pytest.mark.parametrize(
    "first", [[beat(1, 0)], [delta(1, 1, stored(10))], [delta(0, 0, stored(10))]], ids=["beat", "delta", "numbers"]
)
async def test_a_stream_that_begins_without_a_snapshot_is_left(first: list[Report]) -> None:
    def opening(agent: Agent) -> None:
        agent.opening = first

    async with pair(opening) as (agent, gateway):
        await until(lambda: agent.streams >= 2)
        await gateway.refuses("does not begin with a snapshot")


async def test_an_agent_that_never_agrees_with_its_digest_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_stream, "BACKOFF_S", (0.0, 0.0, 600.0))

    def opening(agent: Agent) -> None:
        agent.opening = [snapshot(1, 0, [10]), beat(1, 0, digest=1)]

    async with pair(opening) as (agent, gateway):
        await until(lambda: agent.streams == 2)
        await until(lambda: gateway.stream.losses.get("reports") == 2)
        await gateway.refuses("digest")
        assert agent.streams == 2


async def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10)))
        await gateway.reports([10])
        monkeypatch.setattr(report_stream, "SILENCE_S", 0.2)
        agent.raw_opening = b""
        agent.say_raw(None)
        await gateway.refuses("ReadTimeout")
        agent.raw_opening = None
        agent.opening = [snapshot(1, 1, [10]), beat(1, 1, (Tier.HBM, [10]))]
        await until(lambda: gateway.stream.snapshots >= 2, "back after it")


@pytest.mark.parametrize("what", ["a frame without an end", "deltas", "records"])
async def test_a_stream_without_heartbeats_is_lost_whatever_else_comes(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10)))
        await gateway.reports([10])
        monkeypatch.setattr(report_stream, "SILENCE_S", 0.3)
        agent.opening = [snapshot(2, 0, [10]), beat(2, 0, (Tier.HBM, [10]))]
        agent.say_raw(encode_frame(delta(1, 2, stored(11)))[:10] if what.startswith("a frame") else b"")

        async def trickle() -> None:
            for seq in itertools.count(2):
                await asyncio.sleep(0.05)
                frames = {"deltas": delta(1, seq, stored(seq)), "records": record(replica="r")}
                agent.say_raw(encode_frame(frames[what]) if what in frames else b"\0")

        trickling = asyncio.create_task(trickle())
        await until(lambda: agent.streams == 2 or gateway.stream.losses != {})
        trickling.cancel()
        await until(lambda: gateway.stream.losses == {"connection": 1})


async def test_so_is_one_that_never_pauses_for_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (agent, gateway):
        monkeypatch.setattr(report_stream, "UNVOUCHED_S", 0.2)
        agent.opening = [snapshot(2, 0, []), beat(2, 0)]
        for seq in range(1, 1_000):
            agent.say(delta(1, seq, stored(seq)))
            await asyncio.sleep(0.001)
            if gateway.stream.losses:
                break
        await until(lambda: gateway.stream.losses == {"connection": 1})


async def test_an_answer_that_comes_a_byte_at_a_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_stream, "GREETING_S", 0.2)

    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async def hello(request: Request) -> Response:
        return StreamingResponse(dripping())

    async with serving(Starlette(routes=[Route("/v1/hello", hello)])) as url, followed(url) as gateway:
        await gateway.refuses("/v1/hello: no whole answer within")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"protocol": PROTOCOL_VERSION + 1},
            [f"speaks protocol {PROTOCOL_VERSION + 1}", f"this side {PROTOCOL_VERSION}"],
        ),
        ({"replica_id": "other"}, ["says it is 'other'", "expected 'r'"]),
        ({"dp_rank": 1}, ["speaks for data-parallel rank 1", "the replica is rank 0", "--dp-rank"]),
        ({"route_seed_check": 1}, ["route seeds", "--route-seed", "placement.route_seed"]),
    ],
)
async def test_an_agent_that_does_not_fit_is_named(change: dict[str, object], words: list[str]) -> None:
    def other(agent: Agent) -> None:
        agent.hello = msgspec.structs.replace(HELLO, **change)

    async with pair(other) as (agent, gateway):
        await gateway.refuses(*words)
        assert (agent.streams, gateway.hellos, gateway.replica.hello) == (0, [], None)
        agent.hello = HELLO
        await gateway.reports([])


async def test_a_wrong_token_is_named_and_the_right_one_passes() -> None:
    agent = Agent()
    agent.opening = [snapshot(1, 0, []), beat(1, 0)]
    agent.token = "secret"
    async with serving(agent.app) as url:
        async with followed(url, "wrong") as gateway:
            await gateway.refuses("/v1/hello answered 401", "asks for the token")
            assert "wrong" not in gateway.replica.agent_error
        async with followed(url, "secret") as gateway:
            await gateway.reports([])


@pytest.mark.parametrize(
    ("hello", "word"),
    [
        (b"<html>", "malformed"),
        (b'{"protocol": %d}' % PROTOCOL_VERSION, "required field"),
        (b'{"protocol": 1, "replica_id": []}', "speaks protocol 1"),
        (b'{}', "required field"),
        (b'{"protocol": 1, "new": ' + b"[" * 100_000, "recursion"),
        (msgspec.json.encode(HELLO).replace(b'"geometry":null', b'"geometry":{"layers":1,"kv_heads":1,"head_dim":1,'
         b'"dtype":"fp3"}'), "dtype"),
    ],
    ids=["html", "short", "other", "empty", "deep", "geometry"],
)  # fmt: skip
async def test_a_hello_that_is_none_is_named(hello: bytes, word: str) -> None:
    def garbage(agent: Agent) -> None:
        agent.raw_hello = hello

    async with pair(garbage) as (agent, gateway):
        await gateway.refuses(word)
        agent.raw_hello = None
        await gateway.reports([])


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"HTTP/1.1 200 OK\r\n", "announced a frame"), (b"\0\0\0\1\xc1", "not a report"), (b"\0\0\0\0", "not a report")],
    ids=["text", "invalid", "empty"],
)
async def test_frames_that_are_none_are_named(data: bytes, word: str) -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10)))
        await gateway.reports([10])
        agent.raw_opening = data
        agent.say_raw(data)
        await gateway.refuses(word)
        agent.raw_opening = None
        agent.opening = [snapshot(1, 1, [10]), beat(1, 1, (Tier.HBM, [10]))]
        await gateway.reports([10])
        assert gateway.stream.losses["protocol"] >= 1


@pytest.mark.parametrize("status", [302, 304, 404, 500])
async def test_an_agent_that_answers_something_else_is_named(status: int) -> None:
    def refuse(agent: Agent) -> None:
        agent.reports_answer = Response("not here", status, headers={"location": "http://127.0.0.1:1/"})

    async with pair(refuse) as (agent, gateway):
        await gateway.refuses("/v1/reports", str(status))
        agent.reports_answer = None
        await gateway.reports([])


async def test_a_hello_without_an_end_is_left() -> None:
    def shout(agent: Agent) -> None:
        agent.raw_hello = b"x" * (2 << 20)

    async with pair(shout) as (_, gateway):
        await gateway.refuses("/v1/hello answered more than")


async def test_a_stream_that_the_agent_ends_is_taken_up_again() -> None:
    async with pair() as (agent, gateway):
        agent.say(delta(1, 1, stored(10)))
        await gateway.reports([10])
        agent.opening = [snapshot(2, 0, [20]), beat(2, 0, (Tier.HBM, [20]))]
        agent.say_raw(None)
        await gateway.reports([20])
        assert gateway.stream.losses == {"reports": 1}
        agent.say(delta(2, 1, stored(21)), beat(2, 1, (Tier.HBM, [20, 21])))
        await gateway.reports([20, 21])
        assert gateway.begun == [0, 1], "told once whenever its reports are believed again, with what it holds then"


async def test_an_agent_that_is_gone_is_named_until_it_is_back() -> None:
    port = free_port()
    agent = Agent()
    agent.opening = [snapshot(1, 0, [10]), beat(1, 0, (Tier.HBM, [10]))]
    async with followed(f"http://127.0.0.1:{port}") as gateway:
        await gateway.refuses("ConnectError")
        async with serving(agent.app, port):
            await gateway.reports([10])
            agent.say_raw(None)
            agent.opening = []
        await gateway.refuses("ConnectError")
        agent.opening = [snapshot(2, 0, [20]), beat(2, 0, (Tier.HBM, [20]))]
        async with serving(agent.app, port):
            await gateway.reports([20])
            agent.say_raw(None)


async def test_model_files_are_asked_for_where_they_are_offered() -> None:
    def exact(agent: Agent) -> None:
        agent.hello = msgspec.structs.replace(HELLO, identity_modes=["exact", "text"])

    async with pair(exact) as (_, gateway):
        await gateway.reports([])
        assert gateway.files == [FILES]
    async with pair() as (_, gateway):
        await gateway.reports([])
        assert gateway.files == []


@pytest.mark.parametrize(
    "change",
    [[], [stored(11), removed(11)], [Cleared(tier=Tier.NVME)] * 12],
    ids=["nothing", "a block that comes and goes", "a tier that is empty"],
)
async def test_small_deltas_that_never_end_leave_others_their_turn(change: list[Change]) -> None:
    """Of a thousand that arrive at once no more than some are applied before others have had theirs."""
    ticks = 0.0

    def ticking() -> float:
        nonlocal ticks
        ticks += turns.TURN_S / 20
        return ticks

    async with pair() as (agent, gateway):
        gateway.stream._turns = Turns(ticking, lambda: 0.0)
        applied: list[int] = []

        async def others() -> None:
            while True:
                applied.append(gateway.stream._seq)
                await asyncio.sleep(0)

        watching = asyncio.create_task(others())
        deltas = [delta(1, seq, *change) for seq in range(1, 1_001)]
        agent.say_raw(b"".join(encode_frame(each) for each in deltas))
        await until(lambda: gateway.stream._seq == 1_000)
        watching.cancel()
        assert max(after - before for before, after in itertools.pairwise(applied)) <= 25
        assert gateway.stream.losses == {}

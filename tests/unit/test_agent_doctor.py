"""What an agent finds wrong, and with which flag it says it is mended: real agents, sockets and event streams."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_support import Publisher, agent_running, mirroring, serving, settings_for, stored, tokens_of, until
from doctor_support import Engine
from kv_support import Engine as PoolEngine
from loopback_ports import free_port

from kvstore.messages import Problem
from kvstore.transfer import nixl_agent
from replica_agent.doctor import SETTLED_S, Doctor
from replica_agent.engines.errors import PoolRefused
from replica_agent.kv import pool_keeper
from replica_agent.replica import Replica


@contextlib.asynccontextmanager
async def agent_of(
    engine: Engine, model: Path | None, *, events: int | None = None, replay: int | None = None, **flags: str
) -> AsyncIterator[Replica]:
    """An agent that has seen its engine once."""
    if model is not None:
        flags["model-dir"] = str(model)
    async with serving(engine.app) as url:
        async with agent_running(settings_for(url, events or free_port(), replay, **flags)) as (replica, _):
            await until(lambda: replica.engine_state().up)
            yield replica


@contextlib.contextmanager
def publishing(**more: Any) -> Any:
    """A publisher with its two ports."""
    events, replay = free_port(), free_port()
    publisher = Publisher(events, replay, **more)
    try:
        yield publisher, events, replay
    finally:
        publisher.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def codes(replica: Replica) -> list[str]:
    return [problem.code for problem in replica.problems()]


def problem(replica: Replica, code: str) -> Problem:
    return next(problem for problem in replica.problems() if problem.code == code)


async def test_nothing_is_wrong_with_a_replica_that_does_everything(model: Path, tmp_path: Path) -> None:
    with publishing() as (publisher, events, replay):
        path = tmp_path / "kv"
        async with agent_of(Engine(), model, events=events, replay=replay, **{"kv-socket": str(path)}) as replica:
            await until(lambda: replica.subscriber.connected)
            publisher.publish(stored([1], tokens_of(1)))
            engine = await PoolEngine.connect(path)
            await until(lambda: codes(replica) == [], str(replica.problems()))
            hello = replica.hello()
            assert hello is not None and hello.namespace is not None
            assert hello.namespace.hash_algorithm == "sha256"
            await engine.ask(engine.client.close)
            await until(lambda: codes(replica) == ["pool_unconnected"])
            hello = replica.hello()
            assert hello is not None and hello.namespace is None


async def test_an_engine_that_is_not_there_is_all_there_is_to_say(model: Path) -> None:
    settings = settings_for(f"http://127.0.0.1:{free_port()}", free_port(), None)
    async with agent_running(settings) as (replica, url):
        await until(lambda: replica.engine_error != "")
        (found,) = replica.problems()
        assert (found.code, found.note) == ("engine_down", False)
        assert settings.engine in found.message and "--engine" in found.fix
        async with httpx.AsyncClient(trust_env=False) as client:
            health = (await client.get(f"{url}/health")).json()
        assert [each["code"] for each in health["problems"]] == ["engine_down"]


async def test_a_refused_key(model: Path) -> None:
    engine = Engine()
    engine.status = 401
    async with serving(engine.app) as url, agent_running(settings_for(url, free_port(), None)) as (replica, _):
        await until(lambda: codes(replica) == ["engine_key"], str(replica.problems()))
        assert "--engine-api-key-file" in replica.problems()[0].fix


async def test_events_that_are_off(model: Path) -> None:
    engine = Engine()
    engine.sources = {}
    events, replay = free_port(), free_port()
    async with agent_of(engine, model, events=events, replay=replay) as replica:
        found = problem(replica, "events_off")
        flag = found.fix.removeprefix("vLLM's --kv-events-config ").strip("'")
        assert json.loads(flag) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
    engine.sources = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": None}}
    async with agent_of(engine, model, events=events, **{"dp-rank": "1"}) as replica:
        assert "of rank 1" in problem(replica, "events_off").message
        assert f"tcp://*:{events - 1}" in problem(replica, "events_off").fix, "an engine adds the rank itself"


async def test_events_elsewhere(model: Path) -> None:
    engine = Engine()
    engine.sources = {"0": {"endpoint": "tcp://*:5999", "replay_endpoint": None}}
    async with agent_of(engine, model) as replica:
        found = problem(replica, "events_unconnected")
        assert "tcp://*:5999" in found.message and "--kv-events" in found.fix
        assert "as in vLLM's --kv-events-config" in problem(replica, "replay_missing").fix


async def test_events_of_another_rank_and_a_replay_that_is_not_asked_for(model: Path) -> None:
    engine = Engine()
    with publishing(rank=3) as (publisher, events, replay):
        engine.sources = {"0": {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}}
        async with agent_of(engine, model, events=events) as replica:
            await until(lambda: replica.subscriber.connected)
            publisher.publish(stored([1], tokens_of(1)))
            await until(lambda: "events_rank" in codes(replica))
            assert "--dp-rank 3" in problem(replica, "events_rank").fix
            assert problem(replica, "replay_missing").fix.startswith("agent: --kv-replay")
            assert "as in" not in problem(replica, "replay_missing").fix, "the engine's flag is right"


async def test_a_replay_that_nobody_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with publishing() as (_, events, _replay):
        async with agent_of(Engine(), model, events=events, replay=free_port()) as replica:
            monkeypatch.setattr(replica.subscriber, "_reply_deadline_s", 0.05)
            await until(lambda: "replay_unanswered" in codes(replica))
            assert "replay_endpoint" in problem(replica, "replay_unanswered").fix


async def test_events_that_cannot_be_read(model: Path) -> None:
    with publishing() as (publisher, events, replay):
        async with agent_of(Engine(), model, events=events, replay=replay) as replica:
            await until(lambda: replica.subscriber.connected and not replica.subscriber.syncing)
            publisher.publish(raw=b"\xc1")
            await until(lambda: "events_unreadable" in codes(replica))


async def test_an_engine_that_computes_and_says_nothing(model: Path) -> None:
    engine = Engine()
    with publishing() as (publisher, events, replay):
        async with agent_of(engine, model, events=events, replay=replay, **{"kv-topic": "kv"}) as replica:
            await until(lambda: replica.subscriber.connected)
            assert "events_silent" not in codes(replica)
            engine.prompt_tokens += 100
            await until(lambda: replica.engine_state().metrics.prompt_tokens == 500)
            assert "events_silent" not in codes(replica), "that may all have been cached"
            engine.prompt_tokens += 100
            await until(lambda: "events_silent" in codes(replica))
            assert "--kv-topic 'kv'" in problem(replica, "events_silent").fix
            publisher.publish(stored([1], tokens_of(1)))  # under no topic: it does not arrive
            assert "events_silent" in codes(replica)


async def test_what_the_engine_is_like(tmp_path: Path) -> None:
    engine = Engine()
    engine.block_size, engine.prefix_caching = 24, False
    async with agent_of(engine, None) as replica:
        assert "--block-size" in problem(replica, "block_size").fix
        assert "--enable-prefix-caching" in problem(replica, "prefix_caching_off").fix
        assert "--model-dir" in problem(replica, "model_files").fix


async def test_without_a_pool_it_is_events_and_routing_only(model: Path) -> None:
    async with agent_of(Engine(), model) as replica:
        found = problem(replica, "pool_off")
        assert found.note and found.message.startswith("events and routing only")
        assert '"kv_load_failure_policy": "recompute"' in found.fix


async def test_what_the_engines_side_of_the_pool_says(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    async with agent_of(Engine(), model, **{"kv-socket": str(path)}) as replica:
        found = problem(replica, "pool_unconnected")
        assert f'"socket": "{path}"' in found.fix and not found.note
        with pytest.raises(PoolRefused):
            await PoolEngine.connect(path, kv_heads=3, tp=2)
        await until(lambda: "pool_refused" in codes(replica))
        assert "heads" in problem(replica, "pool_refused").message
        engine = await PoolEngine.connect(path)
        assert not any(code.startswith("pool_") for code in codes(replica))
        assert replica.engine_state().fetch is not None and replica.engine_state().fetch.acts
        saving = await PoolEngine.connect(path, engine_id="life-2", loads=False)
        assert '"kv_load_failure_policy": "recompute"' in problem(replica, "load_policy").fix
        state = replica.engine_state().fetch
        assert state is not None and not state.acts, "nobody plans a fetch for it"
        await saving.ask(saving.client.close)
        await engine.ask(engine.client.close)


async def test_a_data_port_that_is_taken_is_told_and_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'nixl'")

    monkeypatch.setattr(nixl_agent, "_load", missing)
    monkeypatch.setattr(pool_keeper, "RETRY_S", 0.05)
    path = tmp_path / "kv"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = {"kv-socket": str(path), "data-port": str(port), "transports": "nixl,tcp,shm", "host": "127.0.0.1"}
        async with agent_of(Engine(), model, **flags) as replica:
            engine = await PoolEngine.connect(path)
            assert replica.kv is not None
            keeper = replica.kv.keeper
            await until(lambda: "pool_unreachable" in codes(replica) and len(keeper.transports) == 1)
            found = problem(replica, "pool_unreachable")
            assert f"127.0.0.1:{port}" in found.message and "--data-port" in found.fix and not found.note
            assert [each.name for each in keeper.transports] == ["shm"], "what is there is used"
            other.close()
            await until(lambda: "pool_unreachable" not in codes(replica))
            assert [each.name for each in keeper.transports] == ["tcp", "shm"], "the best first"
            assert [*keeper.unavailable] == ["nixl"], "which is not tried again"
            offered = keeper.transports[0].offer()
            assert keeper.transports[0].reaches(offered)
            with socket.create_connection(("127.0.0.1", port)):
                pass
            await engine.ask(engine.client.close)


async def test_gateways_are_told(model: Path) -> None:
    with publishing() as (_, events, replay):
        settings_flags = {"model-dir": str(model)}
        async with serving(Engine().app) as engine_url:
            settings = settings_for(engine_url, events, replay, **settings_flags)
            async with agent_running(settings) as (replica, url), mirroring(url) as mirror:
                await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.kv_events)
                await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.problems == replica.problems())
                assert codes(replica) == ["pool_off"]


async def test_the_log_is_told_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.sources = {}
    now = 0.0
    async with agent_of(engine, model) as replica:
        doctor = Doctor(replica, clock=lambda: now)
        caplog.set_level(logging.INFO, logger="replica_agent.doctor")

        def told() -> list[tuple[str, str]]:
            return [(record.levelname, str(record.msg % record.args).partition(":")[0]) for record in caplog.records]

        doctor.look()
        now += SETTLED_S / 2
        doctor.look()
        assert told() == [], "it may still come up"
        now += SETTLED_S / 2
        for _ in range(3):
            doctor.look()
            doctor.check()
        expected = [("WARNING", "events_off"), ("WARNING", "replay_missing"), ("INFO", "pool_off")]
        assert told() == expected
        engine.block_size = 24
        await until(lambda: "block_size" in codes(replica))
        doctor.look()
        engine.block_size = 16
        await until(lambda: "block_size" not in codes(replica))
        now += SETTLED_S
        doctor.look()
        assert told() == expected, "gone before it was worth a word"
        engine.block_size = 24
        await until(lambda: "block_size" in codes(replica))
        for seconds in (0, SETTLED_S, SETTLED_S):
            now += seconds
            doctor.look()
        assert told() == [*expected, ("WARNING", "block_size")]
        assert all("to change it" in record.getMessage() for record in caplog.records)


class Scripted(Doctor):
    """Finds what a script says."""

    found: tuple[str, ...] = ()

    def problems(self) -> list[Problem]:
        return [Problem(code=code, message="m", fix="f") for code in self.found]


def told_by_rule(history: list[tuple[float, frozenset[str]]]) -> list[str]:
    """From the whole history: a code once it has been there for a while, and again only after it was gone."""
    told = []
    for at, (now, found) in enumerate(history):
        for code in sorted(found):
            start = at
            while start > 0 and code in history[start - 1][1]:
                start -= 1
            began = history[start][0]
            before = any(history[earlier][0] - began >= SETTLED_S for earlier in range(start, at))
            if now - began >= SETTLED_S and not before:
                told.append(code)
    return told


async def test_the_log_follows_its_rule(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="replica_agent.doctor")
    now = [0.0]
    async with agent_of(Engine(), model) as replica:
        for seed in range(20):
            rng = random.Random(seed)
            doctor = Scripted(replica, clock=lambda: now[0])
            caplog.clear()
            history: list[tuple[float, frozenset[str]]] = []
            present: set[str] = set()
            for _ in range(200):
                now[0] += rng.choice((0.0, 1.0, 2.5))
                present ^= {code for code in "abcd" if rng.random() < 0.12}
                doctor.found = tuple(sorted(present))
                doctor.look()
                doctor.check()
                history.append((now[0], frozenset(present)))
            told = [record.getMessage().partition(":")[0] for record in caplog.records]
            assert told == told_by_rule(history), f"seed {seed}"
            assert len(told) > 5

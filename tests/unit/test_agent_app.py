"""The agent over HTTP, with a real engine page and a real publisher behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from agent_support import (
    MODEL,
    SEED,
    EngineStandIn,
    Publisher,
    agent_running,
    chain_of,
    mirroring,
    serving,
    settings_for,
    stored,
    tokens_of,
    until,
)
from kv_support import agent, keys_of
from loopback_ports import free_port

from kvstore.identity import Namespace
from kvstore.messages import MAX_MODELS, PROTOCOL_VERSION, Hello, ModelFiles, decode_hello
from kvstore.transfer.loopback import Network


async def get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(url, headers=headers)


async def test_hello_waits_for_nothing_and_says_so() -> None:
    settings = settings_for(f"http://127.0.0.1:{free_port()}", free_port(), None)
    async with agent_running(settings) as (_, url):
        response = await get(f"{url}/v1/hello")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unseen"
        assert (await get(f"{url}/v1/model-files")).status_code == 503
        health = (await get(f"{url}/health")).json()
        assert (health["status"], health["engine_up"]) == ("engine_down", False)
        (problem,) = health["problems"]
        assert (problem["code"], problem["note"]) == ("engine_down", False)


async def test_a_gateway_of_another_protocol_is_refused_by_number() -> None:
    engine = EngineStandIn()
    events = free_port()
    async with (
        serving(engine.app) as engine_url,
        agent_running(settings_for(engine_url, events, None)) as (replica, url),
    ):
        await until(lambda: replica.hello() is not None)
        response = await get(f"{url}/v1/reports?protocol=99")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "protocol")
        assert f"speaks protocol 99, this agent {PROTOCOL_VERSION}" in response.json()["error"]["message"]
        hello = decode_hello((await get(f"{url}/v1/hello")).content)
        assert (hello.protocol, hello.kv_events) == (PROTOCOL_VERSION, False), "nobody publishes at that port"
        publisher = Publisher(events, None)
        try:
            await until(lambda: replica.subscriber.connected)
            assert decode_hello((await get(f"{url}/v1/hello")).content).kv_events
        finally:
            publisher.close()


async def test_what_an_engine_serves_without_end_is_cut_and_told() -> None:
    engine = EngineStandIn()
    engine.models += [{"id": f"adapter-{number}", "root": None, "parent": MODEL} for number in range(5_000)]
    engine.models.insert(1, {"id": "a" * 600, "root": None, "parent": MODEL})
    async with serving(engine.app) as engine_url, agent_running(settings_for(engine_url, 1, None)) as (replica, url):
        await until(lambda: replica.hello() is not None)
        hello = decode_hello((await get(f"{url}/v1/hello")).content)
        assert (hello.models[:2], len(hello.models)) == ([MODEL, "adapter-0"], MAX_MODELS)


async def test_hello_and_model_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_attention_heads": 2, "hidden_size": 64, "num_hidden_layers": 3, "dtype": "float32"}
            | {"intermediate_size": 128, "vocab_size": 100}
        )
    )
    engine = EngineStandIn()
    engine.root = str(tmp_path)
    async with (
        serving(engine.app) as engine_url,
        agent_running(settings_for(engine_url, free_port(), None)) as (replica, url),
    ):
        await until(lambda: replica.hello() is not None and replica.engine_state().up)
        hello = msgspec.json.decode((await get(f"{url}/v1/hello")).content, type=Hello)
        assert (hello.engine, hello.engine_version, hello.models, hello.engine_up) == ("vllm", "0.32.0", [MODEL], True)
        assert (hello.block_size, hello.capacity_blocks) == (16, 1234)
        assert hello.geometry is not None
        assert hello.geometry.bytes_per_token == 2 * 3 * 2 * 32 * 4
        assert hello.attention == 3 * 2 * 64 / (3 * 4 * 64 * 64 + 3 * 3 * 64 * 128)
        assert hello.identity_modes == ["exact", "text", "hash"]
        assert hello.route_seed_check == Namespace("").root(SEED)
        response = await get(f"{url}/v1/model-files")
        files = msgspec.msgpack.decode(response.content, type=ModelFiles)
        assert (files.model, files.tokenizer_json) == (MODEL, b"{}")
        again = await get(f"{url}/v1/model-files", **{"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_without_files_there_is_no_exact_identity() -> None:
    engine = EngineStandIn()
    async with (
        serving(engine.app) as engine_url,
        agent_running(settings_for(engine_url, free_port(), None)) as (replica, url),
    ):
        await until(lambda: replica.hello() is not None)
        response = await get(f"{url}/v1/model-files")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_model_dir")
        assert (await get(f"{url}/v1/hello")).json()["identity_modes"] == ["text", "hash"]


async def test_the_token_guards_everything_under_v1() -> None:
    engine = EngineStandIn()
    async with serving(engine.app) as engine_url:
        settings = msgspec.structs.replace(settings_for(engine_url, free_port(), None), token="secret")
        async with agent_running(settings) as (replica, url):
            await until(lambda: replica.hello() is not None)
            for path in ("/v1/hello", "/v1/reports", "/v1/model-files", "/v1/nothing"):
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                    response = await get(url + path, **headers)
                    assert response.status_code == 401
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["code"] == "invalid_token"
            assert (await get(f"{url}/v1/hello", authorization="Bearer secret")).status_code == 200
            assert (await get(f"{url}/health")).status_code == 200
            assert (await get(f"{url}/metrics")).status_code == 200
            async with mirroring(url, {"authorization": "Bearer secret"}) as mirror:
                assert mirror.heartbeat is not None


async def test_errors_are_json() -> None:
    async with agent_running(settings_for("http://127.0.0.1:1", free_port(), None)) as (_, url):
        response = await get(f"{url}/v1/nothing")
        assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{url}/v1/hello")).status_code == 405


async def test_reports_follow_the_engine_and_its_load() -> None:
    engine, events, replay = EngineStandIn(), free_port(), free_port()
    publisher = Publisher(events, replay)
    publisher.publish(stored([1], tokens_of(1)))
    try:
        async with (
            serving(engine.app) as engine_url,
            agent_running(settings_for(engine_url, events, replay, **{"heartbeat-interval": "60"})) as (replica, url),
            contextlib.AsyncExitStack() as stack,
        ):
            async with mirroring(url):
                assert replica.hub.streams == 1
            await until(lambda: replica.hub.streams == 0)
            mirror = await stack.enter_async_context(mirroring(url))
            await until(lambda: mirror.hbm == set(chain_of([1])))
            publisher.publish(stored([2], tokens_of(2), parent=1))
            await until(lambda: mirror.hbm == set(chain_of([1, 2])))
            engine.running = 5
            await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.running == 5)
            assert mirror.heartbeat is not None
            assert (mirror.heartbeat.waiting, mirror.heartbeat.kv_usage) == (2, 0.25)
            assert (mirror.heartbeat.engine_up, mirror.heartbeat.blocks) == (True, 2)
            page = (await get(f"{url}/metrics")).text
            assert 'replica_agent_events_total{type="stored"} 2.0' in page
            assert "replica_agent_blocks 2.0" in page
            assert "replica_agent_streams 1.0" in page
            assert f"replica_agent_epoch {float(replica.hub.epoch)}" in page
    finally:
        publisher.close()


async def test_a_debug_page_looks_at_everything(tmp_path: Path) -> None:
    async with agent(tmp_path, Network(), debug="on") as subject:
        engine = await subject.connect()
        assert await engine.save(keys_of(1, 2, 3)) == 3
        keys = keys_of(1, 2)
        await engine.prepare("r", keys)
        page = (await get(f"{subject.url}/debug/check")).json()
        assert page["kv"] == {
            "counters": 0,
            "held": 3,
            "reserved": 0,
            "quarantined": 0,
            "pinned": 2,
            "leases": 0,
            "searches": 1,
            "fetches": 0,
            "winding_down": False,
            "writing": 0,
        }
        assert page["catalogue"]["blocks"] == 0, "no event has named them"
        subject.pool.pin(keys)  # that nobody answers for
        response = await get(f"{subject.url}/debug/check")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "broken_law")
        assert "4 pins in the pool, 2 of" in response.json()["error"]["message"]
    async with agent(tmp_path, Network()) as subject:
        assert (await get(f"{subject.url}/debug/check")).status_code == 404


async def test_a_peer_that_leaves_in_its_own_request_is_no_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent(tmp_path, Network()) as subject:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(subject.url).port)
        writer.write(b"POST /v1/leases HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await until(lambda: subject.gate.seen == ["/v1/leases"])
        writer.close()
        await writer.wait_closed()
        assert (await get(f"{subject.url}/health")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]

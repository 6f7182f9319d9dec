"""An engine that comes back with another model, and a model whose files come late."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import msgspec
import pytest
from agent_support import (
    MODEL,
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
from loopback_ports import free_port

from kvstore.messages import ModelFiles
from replica_agent import engine_client

CONFIG = {
    "num_attention_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "IDENTITY_EVERY_S", 0.05)


@pytest.mark.parametrize("seen", ["gone", "replaced", "running"])
async def test_blocks_are_named_after_the_model_that_is_served_now(seen: str) -> None:
    """Whether the subscription was paused when the other model was heard of, or ran."""
    engine, port, events, replay = EngineStandIn(), free_port(), free_port(), free_port()
    async with (
        contextlib.AsyncExitStack() as first,
        agent_running(settings_for(f"http://127.0.0.1:{port}", events, replay)) as (replica, url),
        mirroring(url) as mirror,
    ):
        publisher = Publisher(events, replay)
        first.callback(lambda: publisher.close())
        await first.enter_async_context(serving(engine.app, port))
        publisher.publish(stored([1], tokens_of(1)))
        await until(lambda: mirror.hbm == set(chain_of([1])), "the first model's block")
        if seen != "running":
            publisher.close()
            await until(lambda: not replica.subscriber.connected)
        if seen == "gone":
            await first.aclose()
            await until(lambda: not replica.engine_state().up)
        async with contextlib.AsyncExitStack() as second:
            engine.models = [{"id": "other", "root": None, "parent": None}]
            if seen != "running":
                engine.start_time += 1
                publisher = Publisher(events, replay)
                second.callback(lambda: publisher.close())
            if seen == "gone":
                await second.enter_async_context(serving(engine.app, port))
            await until(lambda: "model_changed" in replica.resyncs, "the other model")
            publisher.publish(stored([2], tokens_of(2)))
            wanted = {*chain_of([2], model="other"), *(chain_of([1], model="other") if seen == "running" else ())}
            await until(lambda: mirror.hbm == wanted, "the other model's block")
            hello = replica.hello()
            assert hello is not None and hello.models == ["other"]


async def test_files_that_come_after_the_engine_are_found(tmp_path: Path) -> None:
    """A volume that is mounted late: first nothing, then what says how KV looks, then what names prompts."""
    engine, directory = EngineStandIn(), tmp_path / "model"
    engine.root = str(directory)
    async with (
        serving(engine.app) as engine_url,
        agent_running(settings_for(engine_url, free_port(), None)) as (replica, url),
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
        client.stream("GET", f"{url}/v1/reports") as reports,
    ):
        heard = asyncio.create_task(reports.aread())
        await until(lambda: replica.hello() is not None and replica.engine_state().up)
        hello = replica.hello()
        assert hello is not None
        assert (hello.geometry, hello.attention, hello.identity_modes) == (None, 0.0, ["text", "hash"])

        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(CONFIG))
        await until(lambda: replica.geometry is not None)
        await until(heard.done, "gateways are hung up on, so that they ask again")
        hello = replica.hello()
        assert hello is not None and hello.geometry is not None and hello.attention > 0
        assert hello.identity_modes == ["text", "hash"]
        assert "model_files" in [problem.code for problem in replica.problems()]

        (directory / "tokenizer.json").write_text("{}")
        await until(lambda: isinstance(replica.files, ModelFiles))
        hello = replica.hello()
        assert hello is not None and hello.identity_modes == ["exact", "text", "hash"]
        assert "model_files" not in [problem.code for problem in replica.problems()]
        files = msgspec.msgpack.decode((await client.get(f"{url}/v1/model-files")).content, type=ModelFiles)
        assert files.model == MODEL

        # What was found is not read again, nor missed when the volume goes: it is the same model's.
        (directory / "tokenizer.json").unlink()
        (directory / "config.json").unlink()
        seen = replica.files
        looks = engine.identified
        await until(lambda: engine.identified > looks + 2, "looks at the identity")
        assert replica.files is seen and replica.geometry is not None


async def test_a_root_that_cannot_even_be_looked_for_is_no_end_of_the_agent(tmp_path: Path) -> None:
    engine = EngineStandIn()
    engine.root = str(tmp_path / ("long" * 100))
    async with (
        serving(engine.app) as engine_url,
        agent_running(settings_for(engine_url, free_port(), None)) as (replica, _),
    ):
        await until(lambda: replica.hello() is not None and replica.engine_state().up)
        assert not isinstance(replica.files, ModelFiles)

"""What `doctor` finds in deployments that are wrong in one way each: engines' pages, real agents, real sockets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_support import SEED, Publisher, agent_running, serving, settings_for, stored, tokens_of, until
from doctor_support import Engine
from kv_support import Engine as PoolEngine
from loopback_ports import free_port
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tls_support import Pki, serving_tls

from gateway.doctor.report import WIDTH, Diagnosis, render_text
from gateway.doctor.run import examine_all
from gateway.errors import SettingsError
from gateway.settings import EngineTls, PlacementSection, ReplicaSettings, Settings
from replica_agent.replica import Replica as AgentReplica

TOKEN = "deployment"


class Deployment:
    """Replicas as they are configured, and what the doctor says of them."""

    def __init__(self) -> None:
        self.replicas: list[ReplicaSettings] = []
        self.more: dict[str, Any] = {"agent_token": TOKEN, "placement": PlacementSection(route_seed=SEED)}

    def add(self, engine: str, agent: str | None = None, **more: Any) -> None:
        self.replicas.append(ReplicaSettings(id=f"replica-{len(self.replicas)}", engine=engine, agent=agent, **more))

    async def examine(self, *, probe: bool = True) -> Diagnosis:
        return await examine_all(Settings(replicas=self.replicas, **self.more), probe=probe, timeout_s=10)


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.where, finding.code) for finding in diagnosis.findings]


def fix(diagnosis: Diagnosis, code: str) -> str:
    fixes = [finding.fix for finding in diagnosis.findings if finding.code == code]
    assert fixes, found(diagnosis)
    return fixes[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@contextlib.asynccontextmanager
async def replica(
    deployment: Deployment, model: Path, engine: Engine | None = None, *, dp_rank: int | None = None, **flags: str
) -> AsyncIterator[tuple[AgentReplica, PoolEngine]]:
    """One that lacks nothing, added to the deployment: engine, events, agent and pool."""
    at = len(deployment.replicas)
    events, replay, socket = free_port(), free_port(), model / f"kv-{at}"
    token = model / "token"
    token.write_text(TOKEN)
    publisher = Publisher(events, replay, rank=dp_rank or 0)
    flags = {
        "model-dir": str(model),
        "kv-socket": str(socket),
        "replica-id": f"replica-{at}",
        "token-file": str(token),
        "dp-rank": str(dp_rank or 0),
    } | flags
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(publisher.close)
        engine_url = await stack.enter_async_context(serving((engine or Engine()).app))
        settings = settings_for(engine_url, events, replay, **flags)
        made, agent_url = await stack.enter_async_context(agent_running(settings))
        await until(lambda: made.subscriber.connected and not made.subscriber.syncing)
        publisher.publish(stored([1], tokens_of(1)))
        pool = await PoolEngine.connect(socket)
        stack.push_async_callback(pool.ask, pool.client.close)
        await until(lambda: made.problems() == [] or made.block_size % 16 > 0, str(made.problems()))
        deployment.add(engine_url, agent_url, dp_rank=dp_rank)
        yield made, pool


async def test_nothing_is_wrong(model: Path) -> None:
    deployment = Deployment()
    engine = Engine()
    async with replica(deployment, model, engine), replica(deployment, model):
        diagnosis = await deployment.examine()
        assert (diagnosis.ok, found(diagnosis)) == (True, [])
        assert len(engine.asked) == 1
        seen = diagnosis.replicas[0]
        assert (seen.engine_name, seen.engine_version, seen.models, seen.block_size) == ("vllm", "0.32.0", ["m"], 16)
        assert seen.agent_answers and seen.pool_connected
        text = render_text(diagnosis)
        assert "replica-1: engine http://127.0.0.1:" in text and text.endswith("nothing found")
        await deployment.examine(probe=False)
        assert len(engine.asked) == 1, "no token is computed unless it may be"


async def test_an_engine_without_an_agent_is_a_note() -> None:
    deployment = Deployment()
    async with serving(Engine().app) as url:
        deployment.add(url)
        diagnosis = await deployment.examine()
    assert found(diagnosis) == [("replica-0", "no_agent")]
    assert diagnosis.ok and diagnosis.findings[0].note
    assert "0 problems, 1 note" in render_text(diagnosis)


async def test_engines_that_cannot_be_asked() -> None:
    deployment = Deployment()
    keyed, empty, broken = Engine(), Engine(), Engine()
    keyed.key, empty.models = "sk", []
    broken._models = None  # type: ignore[assignment, method-assign]
    async with serving(keyed.app) as a, serving(empty.app) as b:
        for url in (a, b, f"http://127.0.0.1:{free_port()}"):
            deployment.add(url)
        diagnosis = await deployment.examine()
        codes = ["engine_key", "engine_down", "engine_down"]
        assert [code for _, code in found(diagnosis) if code != "no_agent"] == codes
        assert "PREFIX_GATEWAY_ENGINE_API_KEY" in fix(diagnosis, "engine_key")
        assert "asks for an API key" in diagnosis.findings[0].message
        assert not diagnosis.ok
        deployment.more["engine_api_key"] = "other"
        assert "refuses the gateway's API key" in (await deployment.examine()).findings[0].message
        deployment.more["engine_api_key"] = "sk"
        assert ("replica-0", "engine_key") not in found(await deployment.examine())


async def test_an_engine_that_is_not_believed(tmp_path: Path) -> None:
    pki, deployment = Pki(tmp_path), Deployment()
    async with serving_tls(Engine().app, pki.engine) as url:
        deployment.add(url)
        deployment.more["engine_tls"] = EngineTls(ca_file=pki.ca_file)
        assert "engine_tls.server_name" in fix(await deployment.examine(), "engine_tls")
        deployment.more["engine_tls"] = EngineTls(ca_file=pki.ca_file, server_name="engine.test")
        assert found(await deployment.examine()) == [("replica-0", "no_agent")]
        deployment.more["engine_tls"] = EngineTls(ca_file="/absent")
        with pytest.raises(SettingsError, match=r"engine_tls\.ca_file"):
            await deployment.examine()


async def test_usage_without_details_is_seen_by_one_token() -> None:
    deployment, engine = Deployment(), Engine()
    engine.details = False
    async with serving(engine.app) as url:
        deployment.add(url)
        assert "--enable-prompt-tokens-details" in fix(await deployment.examine(), "prompt_tokens_details")
        assert found(await deployment.examine(probe=False)) == [("replica-0", "no_agent")]
        engine.completions = 400
        diagnosis = await deployment.examine()
        assert found(diagnosis) == [("replica-0", "probe_failed"), ("replica-0", "no_agent")]
        assert diagnosis.ok, "not every model completes"


async def test_the_probe_goes_to_the_rank_it_is_about() -> None:
    deployment, engine = Deployment(), Engine()
    async with serving(engine.app) as url:
        deployment.add(url, dp_rank=1)
        await deployment.examine()
    assert [headers["x-data-parallel-rank"] for headers in engine.asked] == ["1"]


async def test_an_agent_passes_on_what_it_finds_and_knows_better() -> None:
    deployment, engine = Deployment(), Engine()
    engine.sources, engine.prefix_caching = {}, True
    events = free_port()
    async with serving(engine.app) as url:
        async with agent_running(settings_for(url, events, None, **{"replica-id": "replica-0"})) as (agent, agent_url):
            await until(lambda: agent.engine_state().up)
            deployment.add(url, agent_url)
            diagnosis = await deployment.examine()
            codes = [code for _, code in found(diagnosis)]
            assert sorted(codes) == ["events_off", "model_files", "pool_off", "replay_missing"]
            assert f'"endpoint": "tcp://*:{events}"' in fix(diagnosis, "events_off")
        diagnosis = await deployment.examine()
        assert [code for _, code in found(diagnosis)] == ["events_off", "agent_down"], "seen from outside as well"
        assert "--kv-events-config" in fix(diagnosis, "events_off")


async def test_agents_that_are_not_the_ones(model: Path) -> None:
    deployment = Deployment()
    async with replica(deployment, model), serving(Engine().app) as other:
        deployment.more["agent_token"] = "wrong"
        assert found(await deployment.examine()) == [("replica-0", "agent_token")]
        deployment.more["agent_token"] = TOKEN
        deployment.more["placement"] = PlacementSection(route_seed=SEED + 1)
        assert "--route-seed" in fix(await deployment.examine(), "route_seed")
        deployment.more["placement"] = PlacementSection(route_seed=SEED)
        agent = deployment.replicas[0].agent
        deployment.replicas = []
        deployment.add(other, other)
        assert found(await deployment.examine()) == [("replica-0", "agent_unknown")]
        deployment.add(other, agent)
        deployment.add(other, agent, dp_rank=2)
        diagnosis = await deployment.examine()
        assert found(diagnosis)[1:] == [
            ("replica-1", "agent_id"),
            ("replica-2", "agent_id"),
            ("replica-2", "agent_rank"),
            ("deployment", "agent_shared"),
        ]
        assert fix(diagnosis, "agent_id").startswith("agent: --replica-id replica-1")


async def test_an_agent_of_another_engine(model: Path) -> None:
    deployment, other = Deployment(), Engine()
    other.models = [{"id": "other", "root": None, "parent": None}]
    async with replica(deployment, model), serving(other.app) as url:
        agent = deployment.replicas[0].agent
        deployment.replicas = []
        deployment.add(url, agent)
        assert found(await deployment.examine()) == [("replica-0", "agent_engine")]


async def test_an_agent_of_another_time() -> None:
    async def hello(request: Request) -> Response:
        return JSONResponse({"protocol": 99})

    async def health(request: Request) -> Response:
        return JSONResponse({"replica_id": "replica-0", "problems": []})

    engine, deployment = Engine(), Deployment()
    engine.app.router.routes += [Route("/v1/hello", hello), Route("/health", health)]
    async with serving(engine.app) as url:
        deployment.add(url, url)
        assert found(await deployment.examine()) == [("replica-0", "agent_protocol")]


async def test_replicas_that_do_not_fit_together(model: Path) -> None:
    deployment = Deployment()
    larger = Engine()
    larger.block_size = 32
    async with (
        contextlib.AsyncExitStack() as stack,
        replica(deployment, model),
        replica(deployment, model, larger) as (agent, _),
    ):
        diagnosis = await deployment.examine()
        assert found(diagnosis) == [("replica-1", "pool_block_size"), ("deployment", "block_sizes")]
        assert "16 tokens on replica-0; 32 tokens on replica-1" in diagnosis.findings[1].message
        identity = {"model": "m", "weights": "w", "hash_seed": "7"}
        other = await PoolEngine.connect(
            model / "kv-1", engine_id="life-2", hash_algorithm="sha256_cbor", block_size=32, identity=identity
        )
        stack.push_async_callback(other.ask, other.client.close)
        await until(lambda: (hello := agent.hello()) is not None and hello.namespace is not None)
        diagnosis = await deployment.examine()
        assert found(diagnosis) == [("deployment", "block_sizes"), ("deployment", "namespace")]
        message = diagnosis.findings[1].message
        assert "hash_algorithm: 'sha256' here, 'sha256_cbor' there" in message and "hash_seed" in message
        assert "--prefix-caching-hash-algo" in fix(diagnosis, "namespace")
        assert "PYTHONHASHSEED" in fix(diagnosis, "namespace")
        text = render_text(diagnosis)
        assert "all replicas together:" in text and text.endswith("2 problems, 0 notes")
        assert max(map(len, text.splitlines())) <= WIDTH


async def test_different_models_are_a_note() -> None:
    deployment, other = Deployment(), Engine()
    other.models = [{"id": "other", "root": None, "parent": None}]
    other.block_size = 128
    async with serving(Engine().app) as a, serving(other.app) as b:
        deployment.add(a)
        deployment.add(b)
        diagnosis = await deployment.examine()
    assert found(diagnosis)[2:] == [("deployment", "models")]
    assert diagnosis.ok and "m by replica-0; other by replica-1" in diagnosis.findings[2].message


async def test_ranks_that_nobody_stands_for(model: Path) -> None:
    engine = Engine()
    engine.sources = {str(rank): {"endpoint": "tcp://*:5557"} for rank in range(3)}
    async with serving(engine.app) as url:
        deployment = Deployment()
        deployment.add(url)
        assert "no replica is rank 0, 1, 2" in str((await deployment.examine()).findings)
        deployment = Deployment()
        deployment.add(url, "http://127.0.0.1:1", dp_rank=0)
        deployment.add(url, dp_rank=2)
        diagnosis = await deployment.examine()
        between = [finding for finding in diagnosis.findings if finding.where == "deployment"]
        assert [finding.code for finding in between] == ["dp_ranks", "dp_agents"]
        assert "no replica is rank 1" in between[0].message and between[1].message.startswith("replica-1 of")
        deployment.add(url, dp_rank=1)
        assert ("deployment", "dp_ranks") not in found(await deployment.examine())


async def test_pages_full_of_nonsense_end_no_examination() -> None:
    async def nonsense(request: Request) -> Response:
        return PlainTextResponse(b"\xff" + b"[" * 100_000, 200, media_type="application/json")

    engine, deployment = Engine(), Deployment()
    paths = ["/kv_event_sources", "/version", "/metrics", "/v1/completions"]
    engine.app.router.routes[:] = [
        route for route in engine.app.router.routes if isinstance(route, Route) and route.path not in paths
    ] + [Route(path, nonsense, methods=["GET", "POST"]) for path in paths]
    async with serving(engine.app) as url:
        deployment.add(url, url)
        assert found(await deployment.examine()) == [("replica-0", "probe_failed"), ("replica-0", "agent_unknown")]


def test_every_code_is_in_the_manual() -> None:
    """Whoever reads a code finds what it means, and the manual explains none that there is not."""
    root = Path(__file__).parents[2]
    sources = [*(root / "gateway" / "doctor").glob("*.py"), root / "replica_agent" / "doctor.py"]
    text = "\n".join(path.read_text() for path in sources)
    codes = set(re.findall(r"""(?:\.report\(|_found\(|code=)\s*"([a-z_]+)\"""", text))
    manual = set(re.findall(r"^\| `([a-z_]+)`", (root / "docs" / "doctor.md").read_text(), re.MULTILINE))
    assert len(codes) > 25
    assert codes == manual

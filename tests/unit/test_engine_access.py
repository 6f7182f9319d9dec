"""API keys, TLS and data-parallel ranks on every way to an engine: a real gateway and agent, real TLS servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_support import EngineStandIn, agent_running, serving, settings_for, until
from behaviours.http_support import serving_gateway
from cryptography.hazmat.primitives import serialization
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tls_support import ENGINE_NAME, Pki, serving_tls

from gateway.errors import SettingsError
from gateway.fleet.engine_access import engine_accesses
from gateway.settings import EngineTls, ReplicaSettings, Settings, load_settings

KEY = "sk-the-engines-own"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class KeyedEngine:
    """Guards `/v1` with a key as vLLM does, and keeps what it was sent."""

    def __init__(self, key: str = KEY) -> None:
        self.key = key
        self.chats: list[dict[str, str]] = []
        self.refused = 0
        self.app = Starlette(routes=[Route("/v1/models", self._models), Route(PATH, self._chat, methods=["POST"])])

    def _admits(self, request: Request) -> bool:
        admits = not self.key or request.headers.getlist("authorization") == [f"Bearer {self.key}"]
        self.refused += not admits
        return admits

    async def _models(self, request: Request) -> Response:
        if not self._admits(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "m"}]})

    async def _chat(self, request: Request) -> Response:
        if not self._admits(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        await request.body()
        self.chats.append(dict(request.headers))
        return JSONResponse({"choices": [], "usage": {"prompt_tokens": 1}})


def replicas(*urls: str, **more: Any) -> list[ReplicaSettings]:
    return [ReplicaSettings(id=f"replica-{at}", engine=url, **more) for at, url in enumerate(urls)]


@asynccontextmanager
async def ready(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose engines are all up."""
    async with serving_gateway(settings) as running:
        every = running.gateway.fleet.replicas.values()
        await until(lambda: all(each.engine_up for each in every), f"{[each.engine_error for each in every]}")
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
            yield client


async def test_proxy_probe_and_listing_use_tls_and_key(pki: Pki) -> None:
    engine = KeyedEngine()
    tls = EngineTls(ca_file=pki.ca_file, server_name=ENGINE_NAME)
    async with serving_tls(engine.app, pki.engine) as url:
        async with ready(Settings(replicas=replicas(url), engine_tls=tls, engine_api_key=KEY)) as client:
            theirs = {"Authorization": "Bearer clients-own", "X-Api-Key": "clients-own", "x-kept": "1"}
            answer = await client.post(PATH, json=CHAT, headers=theirs)
            assert answer.status_code == 200
            models = await client.get("/v1/models", headers=theirs)
            assert [card["id"] for card in models.json()["data"]] == ["m"]
        (sent,) = engine.chats
        assert (sent["authorization"], sent["x-kept"]) == (f"Bearer {KEY}", "1")
        assert "x-api-key" not in sent and "clients-own" not in str(sent)
        assert engine.refused == 0, "the probes carried it, too"
        assert KEY not in str(answer.headers) + answer.text + str(models.headers) + models.text


async def test_without_a_key_of_ours_the_clients_passes() -> None:
    engine = KeyedEngine(key="")

    async with serving(engine.app) as url, ready(Settings(replicas=replicas(url))) as client:
        await client.post(PATH, json=CHAT, headers={"Authorization": "Bearer clients-own"})
    assert engine.chats[0]["authorization"] == "Bearer clients-own"


async def test_an_engine_that_asks_who_calls(pki: Pki) -> None:
    engine = KeyedEngine(key="")
    certificate, key = pki.client
    good = EngineTls(ca_file=pki.ca_file, cert_file=certificate, key_file=key)
    bare = EngineTls(ca_file=pki.ca_file)
    async with serving_tls(engine.app, pki.loopback, client_ca=pki.ca_file) as url:
        two = [
            ReplicaSettings(id="good", engine=url, engine_tls=good, dp_rank=0),
            ReplicaSettings(id="bare", engine=url, engine_tls=bare, dp_rank=1),
        ]
        async with serving_gateway(Settings(replicas=two)) as running:
            fleet = running.gateway.fleet.replicas
            await until(lambda: fleet["good"].engine_up and fleet["bare"].engine_error != "not probed yet")
            assert not fleet["bare"].engine_up
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
                for _ in range(4):
                    assert (await client.post(PATH, json=CHAT)).headers["x-gateway-replica"] == "good"


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_an_engine_that_is_not_the_one_is_never_sent_the_key(pki: Pki, wrong: str) -> None:
    engine = KeyedEngine()
    tls = EngineTls(ca_file=pki.other_ca_file, server_name=ENGINE_NAME)
    if wrong == "name":
        tls = EngineTls(ca_file=pki.ca_file, server_name="other.test")
    async with serving_tls(engine.app, pki.engine) as url:
        settings = Settings(replicas=replicas(url), engine_tls=tls, engine_api_key=KEY)
        async with serving_gateway(settings) as running:
            replica = running.gateway.fleet.replicas["replica-0"]
            await until(lambda: "certificate verify failed" in replica.engine_error, replica.engine_error)
            # The way of clients' requests verifies as well, whatever the probes have found.
            replica.engine_up, replica.models = True, {"m": {"id": "m"}}
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
                answer = await client.post(PATH, json=CHAT)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unreachable")
    assert (engine.chats, engine.refused) == ([], 0)


async def test_a_refused_key_is_the_gateways_fault_and_not_the_clients() -> None:

    good, bad = KeyedEngine(), KeyedEngine()
    async with serving(good.app) as good_url, serving(bad.app) as bad_url:
        settings = Settings(replicas=replicas(good_url, bad_url), engine_api_key=KEY)
        async with ready(settings) as client:
            bad.key = "changed"
            for at in range(6):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{at} " * 100}]}
                answer = await client.post(PATH, json=body)
                assert answer.status_code == 200, "the other one answers"
            good.key = "changed"
            answer = await client.post(PATH, json=CHAT)
            assert answer.status_code in (502, 503)
            assert answer.json()["error"]["code"] in ("upstream_unauthorized", "no_replica")


async def test_a_missing_or_refused_key_is_named() -> None:

    engine = KeyedEngine()
    for key, words in (("", "asks for an API key"), ("wrong", "refuses the API key")):
        async with serving(engine.app) as url:
            async with serving_gateway(Settings(replicas=replicas(url), engine_api_key=key)) as running:
                replica = running.gateway.fleet.replicas["replica-0"]
                await until(lambda replica=replica, words=words: words in replica.engine_error)
                assert "PREFIX_GATEWAY_ENGINE_API_KEY" in replica.engine_error
                assert "wrong" not in replica.engine_error


async def test_ranks_behind_one_url_are_told_apart() -> None:

    engine = KeyedEngine(key="")
    async with serving(engine.app) as url:
        two = [ReplicaSettings(id=f"rank-{rank}", engine=url, dp_rank=rank) for rank in (0, 1)]
        settings = Settings(replicas=two)
        async with ready(settings) as client:
            placed = []
            for at in range(12):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{at} " * 200}]}
                answer = await client.post(PATH, json=body, headers={"X-Data-Parallel-Rank": "7"})
                placed.append(answer.headers["x-gateway-replica"])
    assert [f"rank-{sent['x-data-parallel-rank']}" for sent in engine.chats] == placed
    assert set(placed) == {"rank-0", "rank-1"}


async def test_a_clients_rank_reaches_no_engine() -> None:

    engine = KeyedEngine(key="")
    async with serving(engine.app) as url, ready(Settings(replicas=replicas(url))) as client:
        sent = {"X-data-parallel-rank": "1", "X-Vllm-Priority": "-5"}
        assert (await client.post(PATH, json=CHAT, headers=sent)).status_code == 200
    assert not {"x-data-parallel-rank", "x-vllm-priority"} & set(engine.chats[0])


async def test_the_agent_reaches_its_engine_the_same_way(pki: Pki, tmp_path: Path) -> None:
    engine, key_file = EngineStandIn(), tmp_path / "key"
    key_file.write_text(KEY + "\n")
    certificate, certificate_key = pki.client
    asked: list[str | None] = []
    plain = engine.app

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        asked.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        if asked[-1] != f"Bearer {KEY}":
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await plain(scope, receive, send)

    async with serving_tls(guarded, pki.engine, client_ca=pki.ca_file) as url:
        flags = {
            "engine-api-key-file": str(key_file),
            "engine-ca-file": pki.ca_file,
            "engine-cert-file": certificate,
            "engine-key-file": certificate_key,
            "engine-server-name": ENGINE_NAME,
        }
        async with agent_running(settings_for(url, free_port(), None, **flags)) as (replica, _):
            await until(lambda: replica.engine_state().up)
            hello = replica.hello()
            assert hello is not None and hello.models == ["m"]
            assert KEY not in json.dumps(hello.models)
        assert set(asked) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("tls", "named"),
    [
        ({"ca_file": "/absent"}, "engine_tls.ca_file: /absent: No such file"),
        ({"ca_file": "{empty}"}, "engine_tls.ca_file"),
        ({"ca_file": "{directory}"}, "engine_tls.ca_file"),
        ({"cert_file": "{cert}"}, "engine_tls.key_file: required beside cert_file"),
        ({"key_file": "{key}"}, "engine_tls.cert_file: required beside key_file"),
        ({"cert_file": "{cert}", "key_file": "/absent"}, "engine_tls.key_file: /absent: No such file"),
        ({"cert_file": "{cert}", "key_file": "{other_key}"}, "engine_tls.cert_file"),
    ],
)
def test_a_bad_certificate_stops_the_start_and_is_named(
    pki: Pki, tmp_path: Path, tls: dict[str, str], named: str
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    places = {
        "empty": empty,
        "directory": tmp_path,
        "cert": pki.client[0],
        "key": pki.client[1],
        "other_key": pki.engine[1],
    }
    section = EngineTls(**{key: text.format(**places) for key, text in tls.items()})
    with pytest.raises(SettingsError) as error:
        engine_accesses(Settings(replicas=replicas("https://h:1"), engine_tls=section))
    assert named in str(error.value)
    assert engine_accesses(Settings(replicas=replicas("http://h:1"), engine_tls=section)), "nobody needs it"
    with pytest.raises(SettingsError) as error:
        engine_accesses(Settings(replicas=replicas("https://h:1", engine_tls=section)))
    assert named in str(error.value) and "replica-0" in str(error.value)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(pki: Pki, tmp_path: Path) -> None:
    certificate, key = pki.client
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), password=None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    section = EngineTls(cert_file=certificate, key_file=str(encrypted))
    with pytest.raises(SettingsError, match=r"engine_tls\.cert_file: .*unencrypted key"):
        engine_accesses(Settings(replicas=replicas("https://h:1"), engine_tls=section))


def test_settings_of_one_engine_win_over_those_of_all(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one\n")
    settings = load_settings(
        None,
        {
            "PREFIX_GATEWAY_ENGINE_API_KEY": "all",
            "PREFIX_GATEWAY_ENGINE_TLS__CA_FILE": pki.ca_file,
            "PREFIX_GATEWAY_REPLICAS": json.dumps(
                [
                    {"id": "a", "engine": "https://h:1"},
                    {"id": "b", "engine": "https://h:2", "api_key_file": str(tmp_path / "key"), "dp_rank": 3},
                    {"id": "c", "engine": "https://h:3", "engine_tls": {"server_name": "c.test"}},
                    {"id": "d", "engine": "http://h:4"},
                ]
            ),
        },
    )
    found = engine_accesses(settings)
    assert found["a"].headers == [(b"authorization", b"Bearer all")]
    assert found["b"].headers == [(b"authorization", b"Bearer one"), (b"x-data-parallel-rank", b"3")]
    assert found["a"].tls is found["b"].tls is not None
    assert found["c"].tls not in (None, found["a"].tls)
    assert dict(found["c"].extensions) == {"sni_hostname": "c.test"}
    assert found["d"].tls is None
    (tmp_path / "key").write_text("")
    with pytest.raises(SettingsError, match=r"replicas\[1\]\.api_key_file.*is empty"):
        engine_accesses(settings)
    (tmp_path / "key").unlink()
    with pytest.raises(SettingsError, match=r"replicas\[1\]\.api_key_file.*No such file"):
        engine_accesses(settings)


def test_tls_settings_for_a_plain_engine_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"replicas\[0\]\.engine_tls.*https"):
        engine_accesses(Settings(replicas=replicas("http://h:1", engine_tls=EngineTls())))

"""mTLS between gateways, agents and agents: a whole agent's process, real certificates, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from agent_support import SEED, EngineStandIn, Publisher, serving, stored, tokens_of, until
from loopback_ports import free_port
from test_agent_process import agent_process
from test_kv_peer_client import asking
from tls_support import ENGINE_NAME, Pki

from gateway.errors import SettingsError
from gateway.fleet.agent_access import agent_access, agent_client
from gateway.fleet.replica import Replica
from gateway.fleet.report_stream import ReportStream
from gateway.placement.index import PrefixIndex
from gateway.settings import EngineTls, ReplicaSettings, Settings, load_settings
from kvstore.messages import Hello, ModelFiles
from replica_agent.errors import PeerError
from replica_agent.kv.peers import Peers
from replica_agent.settings import load_settings as load_agent_settings


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@contextlib.asynccontextmanager
async def encrypted(pki: Pki, *flags: str, engine: str = "http://127.0.0.1:1") -> AsyncIterator[str]:
    """The URL of an agent's process that shows the certificate of ENGINE_NAME."""
    port = free_port()
    certificate, key = pki.engine
    tls = ("--tls-cert-file", certificate, "--tls-key-file", key, *flags)
    async with agent_process("--engine", engine, "--port", str(port), "--route-seed", str(SEED), *tls) as process:
        url = f"https://127.0.0.1:{port}"

        async def up() -> bool:
            assert process.returncode is None
            async with agent_client(agent_access(gateway(url, ca_file=pki.ca_file, server_name=ENGINE_NAME))) as client:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(f"{url}/health")).status_code == 200
            return False

        await until(up, "the agent answers")
        yield url


def gateway(url: str, **tls: str) -> Settings:
    """Of a gateway with one replica."""
    replica = ReplicaSettings(id="replica-0", engine="http://127.0.0.1:1", agent=url)
    return Settings(replicas=[replica], tls=EngineTls(**tls))


async def ask(url: str, **tls: str) -> httpx.Response:
    async with agent_client(agent_access(gateway(url, **tls))) as client:
        return await client.get(f"{url}/v1/hello")


async def test_a_gateway_follows_an_agent_over_mutual_tls(pki: Pki) -> None:
    engine, events, replay = EngineStandIn(), free_port(), free_port()
    publisher = Publisher(events, replay)
    publisher.publish(stored([1], tokens_of(1)))
    certificate, key = pki.client
    try:
        async with serving(engine.app) as engine_url:
            flags = ("--tls-ca-file", pki.ca_file, "--kv-events", f"tcp://127.0.0.1:{events}")
            flags += ("--kv-replay", f"tcp://127.0.0.1:{replay}")
            async with encrypted(pki, *flags, engine=engine_url) as url:
                settings = gateway(
                    url, ca_file=pki.ca_file, cert_file=certificate, key_file=key, server_name=ENGINE_NAME
                )
                replica, index = Replica(settings.replicas[0]), PrefixIndex()
                index.add_replica("replica-0")
                hellos: list[Hello] = []

                async def learn(replica: Replica, files: ModelFiles) -> None: ...

                async with agent_client(agent_access(settings)) as client:
                    assert replica.agent is not None
                    stream = ReportStream(
                        replica,
                        replica.agent,
                        index,
                        client,
                        token="",
                        route_seed=SEED,
                        on_hello=lambda _, hello: hellos.append(hello),
                        on_model_files=learn,
                        on_fetch=lambda record: None,
                    )
                    following = asyncio.create_task(stream.follow())
                    await until(lambda: replica.reporting and len(index) == 1, "followed")
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                assert hellos and hellos[0].replica_id == "replica-0"
    finally:
        publisher.close()


async def test_only_certificates_of_the_authority_are_let_in(pki: Pki) -> None:
    certificate, key = pki.client
    other_certificate, other_key = pki.stranger
    own = {"ca_file": pki.ca_file, "server_name": ENGINE_NAME}
    async with encrypted(pki, "--tls-ca-file", pki.ca_file) as url:
        admitted = await ask(url, cert_file=certificate, key_file=key, **own)
        assert (admitted.status_code, admitted.json()["error"]["code"]) == (503, "engine_unseen")
        refused = await ask(url, **own)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "client_certificate")
        async with agent_client(agent_access(gateway(url, **own))) as client:
            for path in ("/v1/reports", "/v1/fetches", "/v1/model-files"):
                assert (await client.get(f"{url}{path}")).status_code == 403
            for path in ("/health", "/metrics"):
                assert (await client.get(f"{url}{path}")).status_code == 200, "a probe has no certificate"
        with pytest.raises(httpx.TransportError):
            await ask(url, cert_file=other_certificate, key_file=other_key, **own)
        for wrong in ({"ca_file": pki.other_ca_file, "server_name": ENGINE_NAME}, {"ca_file": pki.ca_file}):
            with pytest.raises(httpx.TransportError, match="certificate verify failed"):
                await ask(url, cert_file=certificate, key_file=key, **wrong)
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(url.replace("https", "http") + "/health")


async def test_without_an_authority_it_is_encrypted_and_for_everyone(pki: Pki) -> None:
    async with encrypted(pki) as url:
        answer = await ask(url, ca_file=pki.ca_file, server_name=ENGINE_NAME)
        assert answer.json()["error"]["code"] == "engine_unseen"


async def test_agents_ask_each_other_with_their_own_certificates(pki: Pki) -> None:
    def peer(certificate: tuple[str, str], ca_file: str) -> Peers:
        flags = ["--engine", "http://127.0.0.1:1", "--tls-cert-file", certificate[0], "--tls-key-file", certificate[1]]
        flags += ["--tls-ca-file", ca_file, "--tls-server-name", ENGINE_NAME]
        return Peers(None, tls=load_agent_settings(flags, {}).tls)

    async with encrypted(pki, "--tls-ca-file", pki.ca_file) as url:
        for certificate, ca_file, code in (
            (pki.engine, pki.ca_file, "no_engine"),
            (pki.stranger, pki.ca_file, "unreachable"),
            (pki.engine, pki.other_ca_file, "unreachable"),
        ):
            peers = peer(certificate, ca_file)
            with pytest.raises(PeerError) as caught:
                await peers.lease(url, asking(), 5.0)
            assert caught.value.code == code, caught.value
            await peers.close()
        plain = Peers(None)
        with pytest.raises(PeerError, match="certificate verify failed"):
            await plain.lease(url, asking(), 5.0)
        await plain.close()


def test_files_that_cannot_be_used_are_named(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    agent, certificate = "https://127.0.0.1:1", pki.client[0]
    for tls, key in (
        ({"ca_file": "/no/such/file"}, "tls.ca_file"),
        ({"ca_file": str(tmp_path / "empty.pem")}, "tls.ca_file"),
        ({"cert_file": certificate}, "tls.key_file"),
        ({"cert_file": certificate, "key_file": pki.engine[1]}, "tls.cert_file"),
    ):
        with pytest.raises(SettingsError, match=key):
            agent_client(agent_access(gateway(agent, **tls)))
    with pytest.raises(SettingsError, match=r"tls: the agents' URLs are http://127.0.0.1:1.*needs https"):
        agent_client(agent_access(gateway("http://127.0.0.1:1", ca_file=pki.ca_file)))


def test_the_section_comes_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(msgspec.json.encode({"tls": {"ca_file": "/ca.pem", "server_name": "agents"}}).decode())
    settings = load_settings(file, {"PREFIX_GATEWAY_TLS__CERT_FILE": "/cert.pem"})
    assert settings.tls == EngineTls(ca_file="/ca.pem", cert_file="/cert.pem", server_name="agents")
    with pytest.raises(SettingsError, match="tls"):
        load_settings(None, {"PREFIX_GATEWAY_TLS__CA": "/ca.pem"})

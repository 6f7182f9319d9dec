"""A real vLLM behind its API key and TLS: gateway, agent and doctor get to it, or say what keeps them from it."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import msgspec
import pytest
from agent_support import agent_running, until
from behaviours.http_support import serving_gateway
from tls_support import Pki
from vllm_engine import agent_settings
from vllm_models import model_directory
from vllm_server import VllmServer

from gateway.doctor.report import Diagnosis
from gateway.doctor.run import examine_all
from gateway.settings import EngineTls, ReplicaSettings, Settings
from kvstore.client_tls import client_context

pytestmark = pytest.mark.vllm

KEY = "sk-the-engines-own"


class SecureServer(VllmServer):
    """A server that shows a certificate of `ca_file`."""

    def __init__(self, model: Path, pki: Pki) -> None:
        certificate, key = pki.loopback
        flags = ["--api-key", KEY, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        super().__init__(model, kv_tokens=4096, events=False, flags=flags)
        self._context: ssl.SSLContext = client_context(pki.ca_file)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", verify=self._context, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def codes(diagnosis: Diagnosis) -> set[str]:
    return {finding.code for finding in diagnosis.findings}


async def test_everybody_gets_to_an_engine_with_key_and_tls(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    with SecureServer(model_directory("tiny"), pki) as server:
        server.start()
        server.wait_ready()
        bare = Settings(replicas=[ReplicaSettings(id="replica-0", engine=server.url)])
        trusting = msgspec.structs.replace(bare, engine_tls=EngineTls(ca_file=pki.ca_file))
        knowing = msgspec.structs.replace(trusting, engine_api_key=KEY)
        for settings, expected in ((bare, {"engine_tls"}), (trusting, {"engine_key"}), (knowing, set())):
            diagnosis = await examine_all(settings, probe=True, timeout_s=60)
            assert codes(diagnosis) == expected | {"no_agent"}
        assert diagnosis.replicas[0].models == ["tiny"] and diagnosis.replicas[0].engine_name == "vllm"

        async with serving_gateway(knowing) as running:
            await until(lambda: running.gateway.fleet.ready())
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60) as client:
                answer = await client.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": "Once", "max_tokens": 2},
                    headers={"authorization": "Bearer clients-own"},
                )
            assert answer.status_code == 200, answer.text
            assert KEY not in str(answer.headers) + answer.text

        settings = msgspec.structs.replace(
            agent_settings(server), engine_api_key=KEY, engine_tls=client_context(pki.ca_file)
        )
        async with agent_running(settings) as (replica, _):
            await until(lambda: replica.engine_state().up)
            (off,) = [problem for problem in replica.problems() if problem.code == "events_off"]
            assert '"enable_kv_cache_events": true' in off.fix
            hello = replica.hello()
            assert hello is not None and hello.models == ["tiny"]

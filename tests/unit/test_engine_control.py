"""What clients may not tell an engine does not reach one: fields, headers and endpoints, in any spelling."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from agent_support import serving, until
from behaviours.http_support import serving_gateway
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.path.body import STRIPPED
from gateway.path.headers import ENGINE_CONTROL
from gateway.settings import ReplicaSettings, Settings

ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hi"}]]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": ["hi"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/systemone": {"state": "a", "questions": {}},
    "/v1/chat/completions/render": {"messages": []},
    "/v1/an/endpoint/of/the/future": {},
}
VALUES: dict[str, Any] = {
    "kv_transfer_params": {"prefix_gateway": {"url": "http://evil"}, "do_remote_prefill": True},
    "ec_transfer_params": {"peer": "evil"},
    "cache_salt": "other-tenant",
    "extra_key": "other-tenant",
    "vllm_xargs": {"kv_cache_report_mode": "full"},
    "priority": -100,
}


class Recorder:
    """An engine that answers anything, and keeps what it was sent beside probes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if (request.method, request.url.path) == ("GET", "/v1/models"):
            await JSONResponse({"data": [{"id": "m"}]})(scope, receive, send)
            return
        self.seen.append((request.method, request.url.path))
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.body())
        await JSONResponse({"ok": True})(scope, receive, send)


@pytest.fixture
async def rig() -> AsyncIterator[tuple[Recorder, httpx.AsyncClient]]:
    engine = Recorder()
    async with serving(engine) as url:
        async with serving_gateway(Settings(replicas=[ReplicaSettings(id="r", engine=url)])) as running:
            await until(lambda: running.gateway.fleet.ready())
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
                yield engine, client


def escaped(key: str) -> str:
    """The key with every character as a JSON escape."""
    return "".join(f"\\u{ord(character):04x}" for character in key)


async def test_control_fields_reach_no_endpoint(rig: tuple[Recorder, httpx.AsyncClient]) -> None:
    engine, client = rig
    control = {key: VALUES.get(key, 1) for key in STRIPPED}
    assert len(control) >= 12
    for path, body in ENDPOINTS.items():
        plain = {"model": "m"} | body
        allowed = plain | {"return_token_ids": True, "metadata": {"priority": "x"}}
        spellings = [
            json.dumps(allowed | control),
            json.dumps(control | allowed),
            json.dumps(allowed)[:-1]
            + "".join(f', "{escaped(key)}" : {json.dumps(value)}' for key, value in control.items())
            + "}",
            json.dumps(allowed)[:-1]
            + "".join(f', "{key[0]}\\u{ord(key[1]):04X}{key[2:]}":null' for key in control)
            + "}",
        ]
        for spelling in spellings:
            answer = await client.post(path, content=spelling)
            assert answer.status_code == 200, (path, answer.text)
            assert json.loads(engine.bodies.pop()) == allowed, (path, spelling)
        assert len(engine.seen) == len(spellings)
        engine.seen.clear()


async def test_what_could_be_read_two_ways_is_refused(rig: tuple[Recorder, httpx.AsyncClient]) -> None:
    engine, client = rig
    opening = '{"model":"m","prompt":"hi"'
    for key in sorted(STRIPPED):
        for first, second in ((key, escaped(key)), (escaped(key), key), (key, key)):
            answer = await client.post("/v1/completions", content=f'{opening},"{first}":1,"{second}":2}}')
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_key"), (first, second)
    body = opening + ',"cache_salt":"x"}'
    for raw in (
        b"\xef\xbb\xbf" + body.encode(),
        body.encode("utf-16"),
        body.encode("utf-16-be"),
        body.encode("utf-32"),
        b"[" + body.encode() + b"]",
        b"model=m&cache_salt=x",
    ):
        answer = await client.post("/v1/completions", content=raw)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), raw
    compressed = await client.post("/v1/completions", content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
    assert compressed.status_code == 400
    assert not engine.seen


async def test_control_headers_stop_here(rig: tuple[Recorder, httpx.AsyncClient]) -> None:
    engine, client = rig
    assert {b"x-data-parallel-rank", b"x-vllm-priority"} <= ENGINE_CONTROL
    sent = {name.decode().title(): "1" for name in ENGINE_CONTROL}
    for path, body in ENDPOINTS.items():
        await client.post(path, json={"model": "m"} | body, headers=sent | {"x-kept": "1"})
        (headers,) = engine.headers
        assert headers["x-kept"] == "1"
        assert not {name.decode() for name in ENGINE_CONTROL} & set(headers)
        engine.headers.clear()


OPERATORS = [
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/abort_requests",
    "/release_kv_cache_memory",
    "/server_info",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/start_profile",
    "/stop_profile",
    "/invocations",
    "/tokenize",
    "/kv_event_sources",
    "/metrics",
    "/flush_cache",
    "/generate",
    "/v2/rerank",
    "/cohere/v2/chat",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]


async def test_operators_endpoints_are_not_reachable(rig: tuple[Recorder, httpx.AsyncClient]) -> None:
    engine, client = rig
    body = {"model": "m", "lora_name": "x", "lora_path": "/etc", "method": "x"}
    for path in OPERATORS:
        for method in ("POST", "GET", "PUT"):
            answer = await client.request(method, path, json=body)
            assert answer.status_code in (404, 405), (method, path, answer.status_code)
    assert not engine.seen


DETOURS = [
    "/v1/../{}",
    "/v1/%2e%2e/{}",
    "/v1/%252e%252e/{}",
    "/v1/..%2f{}",
    "/v1/..%5c{}",
    "/v1/.%2e/{}",
    "/v1/./../{}",
    "/v1/chat/../../{}",
    "/v1//{}",
    "/v1/./{}",
    "//v1/../{}",
    "/{}/",
    "/V1/{}",
    "/v1/chat/completions/../{}",
]
SPELLINGS = [
    "/v1/load_lora_adapter/",
    "/v1/load%5Flora%5fadapter",
    "/v1/%6coad_lora_adapter",
    "/v1/load%255Flora_adapter",
]


async def test_no_detour_and_no_spelling_leads_there(rig: tuple[Recorder, httpx.AsyncClient]) -> None:
    engine, client = rig
    targets = [form.format(operation) for operation in ("reset_prefix_cache", "load_lora_adapter") for form in DETOURS]
    for target in [*targets, *SPELLINGS]:
        # As it is: httpx would make the path plain before it sends it.
        extensions = {"target": target.encode()}
        answer = await client.send(httpx.Request("POST", client.base_url, json={"model": "m"}, extensions=extensions))
        assert answer.status_code in (400, 404, 405), (target, answer.text)
        assert target not in SPELLINGS or answer.json()["error"]["code"] == "not_found", target
    assert not engine.seen

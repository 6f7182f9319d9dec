"""HTTP behaviours of the gateway, against engines that fail in every way they can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import httpx
import openai
import pytest
from http_support import MODEL, Call, FaultEngine, event, eventually, running_gateway

from gateway import http_protocol

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
PATH = "/v1/chat/completions"


def client(url: str, **options: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=30, **options)  # type: ignore[arg-type]


async def ok(call: Call) -> None:
    await call.chat()


async def test_counters_return_to_zero():
    rng = random.Random(7)
    silent = asyncio.Event()

    async def handler(call: Call) -> None:
        kind = call.json.get("user")
        if kind == "500":
            await call.reply(500, {"error": {"message": "boom", "type": "server_error", "code": None, "param": None}})
        elif kind == "400":
            await call.reply(400, {"error": {"message": "no", "type": "invalid_request_error", "code": "x"}})
        elif kind == "503":
            await call.reply(503, {"error": {"message": "busy", "type": "server_error", "code": None}})
        elif kind == "reset":
            call.reset()
        elif kind == "midstream":
            await call.start()
            await call.chunk(event("a"))
            call.reset()
        elif kind in ("silent", "abort"):
            if kind == "abort":
                await call.start()
                await call.chunk(event("a"))
            await silent.wait()
        else:
            await call.chat()

    kinds = ["ok", "ok", "500", "400", "503", "reset", "midstream", "silent", "abort", "refused", "bad"]

    async def one(http: httpx.AsyncClient, kind: str) -> None:
        stream = kind in ("midstream", "abort") or rng.random() < 0.5
        body = CHAT | {"user": kind, "stream": stream, "n": rng.randint(1, 3)}
        if kind == "bad":
            assert (await http.post(PATH, content=b"{")).status_code == 400
        elif kind == "refused":
            assert (await http.post(PATH, json=body | {"model": "absent"})).status_code == 404
        elif kind == "silent":
            with contextlib.suppress(httpx.HTTPError):
                await http.post(PATH, json=body, timeout=0.05)
        elif kind == "abort":
            async with http.stream("POST", PATH, json=body) as response:
                async for _ in response.aiter_raw():
                    break
        else:
            await http.post(PATH, json=body)

    async with FaultEngine(handler) as a, FaultEngine(handler) as b, running_gateway(a, b) as running:
        gate = asyncio.Semaphore(24)
        limits = httpx.Limits(max_connections=24)

        async def limited(kind: str) -> None:
            async with gate:
                await one(http, kind)
                running.loads()

        async with client(running.url, limits=limits) as http:
            await asyncio.gather(*(limited(rng.choice(kinds)) for _ in range(1000)))
            zero = {"replica-0": (0, 0), "replica-1": (0, 0)}
            await eventually(lambda: running.loads() == zero, f"{running.loads()}")
            assert running.gateway.admission.admitted == 0
        assert len(a.calls) + len(b.calls) > 500


async def test_broken_stream_is_told():
    async def handler(call: Call) -> None:
        await call.start()
        for at in range(3):
            await call.chunk(event(str(at)))
        await call.chunk(event("never seen")[:20])
        call.reset()

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        answer = await http.post(PATH, json=CHAT | {"stream": True})
        events = [part for part in answer.content.split(b"\n\n") if part]
        assert events[:3] == [event(str(at)).strip() for at in range(3)]
        assert json.loads(events[3].removeprefix(b"data: "))["error"]["code"] == "upstream_reset"
        assert len(events) == 4
        assert b"[DONE]" not in answer.content
        sdk = openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
        got = []
        with pytest.raises(openai.APIError) as raised:
            async for chunk in await sdk.chat.completions.create(**CHAT, stream=True):
                got.append(chunk.choices[0].delta.content)
        assert got == ["0", "1", "2"]
        assert raised.value.code == "upstream_reset"
        await sdk.close()
        async with client(running.admin_url) as admin:
            metrics = (await admin.get("/metrics")).text
            assert 'outcome="upstream_reset"' in metrics
            receipt = (await admin.get(f"/admin/receipts/{answer.headers['x-request-id']}")).json()
            assert receipt["outcome"] == "upstream_reset"


@pytest.mark.parametrize("started", [False, True])
async def test_disconnect_reaches_a_silent_engine(started):
    async def handler(call: Call) -> None:
        if started:
            await call.start()
            await call.chunk(event("a"))
        await asyncio.Event().wait()

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        sending = asyncio.create_task(http.post(PATH, json=CHAT | {"stream": True}))
        await eventually(lambda: bool(engine.calls))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.wait_for(engine.calls[0].closed.wait(), 10)
        await eventually(lambda: running.loads() == {"replica-0": (0, 0)})


AMBIGUOUS = [
    b'{"model":"m","model":"m","messages":[]}',
    b'{"model":"m","mod\\u0065l":"other","messages":[]}',
    b'{"model":"m","messages":[],"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"m","messages":[],"cache_salt":"a","cache\\u005fsalt":"b"}',
    b'{"model":"m","messages":[],"stream":true,"str\\u0065am":false}',
]


async def test_ambiguous_bodies_are_refused():
    async with FaultEngine(ok) as engine, running_gateway(engine) as running, client(running.url) as http:
        for body in AMBIGUOUS:
            answer = await http.post(PATH, content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_key"), body
        assert not engine.calls
        forbidden = {"cache_salt": "s", "kv_transfer_params": {"x": 1}, "priority": -5, "vllm_xargs": {"a": 1}}
        assert (await http.post(PATH, json=CHAT | forbidden)).status_code == 200
        assert engine.calls[0].json == CHAT
        escaped = json.dumps(CHAT)[:-1] + ', "cache\\u005fsalt": "s", "priorit\\u0079": 1}'
        assert (await http.post(PATH, content=escaped)).status_code == 200
        assert engine.calls[1].json == CHAT


async def test_bytes_pass_unchanged():
    stream = event("é😀\u2028 \\u2028") + b": comment\n\n" + b'data: {"odd":1.50,"choices":[{"x":[]}]}\r\n\r\n'
    cuts = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    seen = asyncio.Queue[bytes]()

    async def handler(call: Call) -> None:
        await call.start()
        received = b""
        for cut in cuts:
            await call.chunk(cut)
            received += await seen.get()  # the client has this chunk before the next is sent
            while len(received) % 7 and len(received) < len(stream):
                received += await seen.get()
        await call.end()

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        raw = (
            b'{ "temperature" : 1.50,"model":"m" , "messages":[{"role":"user","content":"\\u2028 \xe2\x80\xa8"}],'
            b'"unknown":{"a":1e400},"user":"x","user":"y","stream":true,"stream_options":{"include_usage":true}}'
        )
        async with http.stream("POST", PATH + "?a=b%20c", content=raw) as response:
            got = b""
            async for data in response.aiter_raw():
                got += data
                seen.put_nowait(data)
        assert got == stream
        assert engine.calls[0].body == raw
        assert engine.calls[0].head.startswith(b"POST /v1/chat/completions?a=b%20c HTTP/1.1\r\n")


async def test_retry_is_disciplined():
    async def refuse(call: Call) -> None:
        call.reset()

    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FaultEngine(refuse)) for _ in range(3)]
        running = await stack.enter_async_context(running_gateway(*engines))
        http = await stack.enter_async_context(client(running.url))
        for _ in range(200):
            answer = await http.post(PATH, json=CHAT)
            assert answer.status_code == 502
            assert answer.headers["x-should-retry"] == "false"
        attempts = sum(len(engine.calls) for engine in engines)
        assert 200 < attempts <= 200 * 1.2 + 3
        admin = await stack.enter_async_context(client(running.admin_url))
        receipt = (await admin.get(f"/admin/receipts/{answer.headers['x-request-id']}")).json()
        assert len(set(receipt["tried"])) == len(receipt["tried"])


async def test_a_refused_connection_is_retried_elsewhere_and_that_replica_left_alone():
    async with FaultEngine(ok) as a, FaultEngine(ok) as b, running_gateway(a, b) as running:
        async with client(running.url) as http:
            await a.stop()
            for at in range(20):
                body = {"model": MODEL, "messages": [{"role": "user", "content": f"{at} " * 200}]}
                answer = await http.post(PATH, json=body)
                assert (answer.status_code, answer.headers["x-gateway-replica"]) == (200, "replica-1")
        assert not running.gateway.fleet.replicas["replica-0"].engine_up


async def test_nothing_is_retried_once_an_answer_has_begun():
    async def handler(call: Call) -> None:
        await call.start()
        await call.chunk(event("a"))
        call.reset()

    async with FaultEngine(handler) as a, FaultEngine(handler) as b, running_gateway(a, b) as running:
        async with client(running.url) as http:
            await http.post(PATH, json=CHAT | {"stream": True})
        assert len(a.calls) + len(b.calls) == 1


async def test_hung_replica_times_out():
    async def hang(call: Call) -> None:
        await asyncio.Event().wait()

    async with FaultEngine(hang) as engine, running_gateway(engine, first_byte_timeout_s=0.3) as running:
        async with client(running.url) as http, client(running.admin_url) as admin:
            answer = await http.post(PATH, json=CHAT | {"stream": True})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
            assert 'outcome="upstream_timeout"' in (await admin.get("/metrics")).text
        await asyncio.wait_for(engine.calls[0].closed.wait(), 10)


async def test_errors_are_openai_shaped():
    """Every status parses into the SDK's exception type, with code and request id."""

    async def handler(call: Call) -> None:
        status = int(call.json["user"])
        await call.reply(status, {"error": {"message": "m", "type": "t", "param": None, "code": "c"}})

    expected = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        422: openai.UnprocessableEntityError,
        429: openai.RateLimitError,
        500: openai.InternalServerError,
        503: openai.InternalServerError,
    }
    async with FaultEngine(handler) as engine, running_gateway(engine, max_body_bytes=5000) as running:
        sdk = openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
        for status, kind in expected.items():
            with pytest.raises(kind) as raised:
                await sdk.chat.completions.create(**CHAT, user=str(status))
            assert (raised.value.status_code, raised.value.code) == (status, "c")
            assert raised.value.request_id
        own = [
            (404, "model_not_found", openai.NotFoundError, CHAT | {"model": "absent"}),
            (400, "missing_field", openai.BadRequestError, CHAT | {"model": ""}),
            (400, "invalid_type", openai.BadRequestError, CHAT | {"stream_options": [1], "stream": True}),
            (
                400,
                "invalid_type",
                openai.BadRequestError,
                CHAT | {"stream_options": {"include_usage": 1}, "stream": True},
            ),
            (413, "body_too_large", openai.APIStatusError, CHAT | {"user": "x" * 6000}),
        ]
        for status, code, kind, body in own:
            with pytest.raises(kind) as raised:
                await sdk.chat.completions.create(**body)
            assert (raised.value.status_code, raised.value.code) == (status, code)
            assert raised.value.request_id
        await sdk.close()
        async with client(running.url) as http:
            for method, path, status in (("GET", "/nowhere", 404), ("PUT", "/v1/models", 405), ("GET", PATH, 404)):
                answer = await http.request(method, path)
                assert answer.status_code == status
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert answer.headers["x-request-id"]
        await engine.stop()
        async with client(running.url) as http:
            answer = await http.post(PATH, json=CHAT)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] in ("upstream_unreachable", "no_replica")


async def test_overload_is_a_429_with_retry_after():
    release = asyncio.Event()

    async def handler(call: Call) -> None:
        await release.wait()
        await call.chat()

    async with FaultEngine(handler) as engine, running_gateway(engine, max_concurrent_requests=2) as running:
        async with client(running.url) as http:
            held = [asyncio.create_task(http.post(PATH, json=CHAT)) for _ in range(2)]
            await eventually(lambda: len(engine.calls) == 2)
            refused = await http.post(PATH, json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "overloaded"
            release.set()
            assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
            assert (await http.post(PATH, json=CHAT)).status_code == 200


async def test_headers_of_a_receipt_and_of_the_engine():
    async def handler(call: Call) -> None:
        extra = b"x-engine: yes\r\nx-gateway-replica: liar\r\nconnection: x-hop\r\nx-hop: 1\r\n"
        usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
        await call.reply(200, {"id": "c", "choices": [], "usage": usage}, extra)

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        sent = {"x-request-id": "mine-1", "authorization": "Bearer k", "x-gateway-pin": "replica-0", "te": "trailers"}
        answer = await http.post(PATH, json=CHAT, headers=sent)
        receipt = {name: value for name, value in answer.headers.items() if name.startswith("x-gateway-")}
        assert receipt == {
            "x-gateway-replica": "replica-0",
            "x-gateway-reason": "fallback",
            "x-gateway-identity": "hash",
            "x-gateway-predicted-cached-tokens": "0",
            "x-gateway-cached-tokens": "3",
        }
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-engine"] == "yes"
        assert "x-hop" not in answer.headers
        head = engine.calls[0].head.lower()
        assert b"authorization: bearer k" in head
        assert b"x-request-id: mine-1" in head
        assert b"x-gateway-pin" not in head
        assert b"te: trailers" not in head
        assert b"accept-encoding: identity" in head


async def test_usage_is_asked_for_and_not_shown():
    async with FaultEngine(ok) as engine, running_gateway(engine) as running:
        async with client(running.url) as http, client(running.admin_url) as admin:
            answer = await http.post(PATH, json=CHAT | {"stream": True, "stream_options": {"x": 1}})
            assert engine.calls[0].json["stream_options"] == {"x": 1, "include_usage": True}
            assert answer.content == event("hi") + b"data: [DONE]\n\n"
            receipt = (await admin.get(f"/admin/receipts/{answer.headers['x-request-id']}")).json()
            assert (receipt["prompt_tokens"], receipt["cached_tokens"], receipt["outcome"]) == (7, 0, "ok")
            asked = await http.post(PATH, json=CHAT | {"stream": True, "stream_options": {"include_usage": True}})
            assert b'"usage"' in asked.content


async def test_a_pin_holds_only_where_pinning_is_allowed():
    async with FaultEngine(ok) as a, FaultEngine(ok) as b:
        async with running_gateway(a, b, allow_pinning=True) as running, client(running.url) as http:
            for name in ("replica-0", "replica-1"):
                answer = await http.post(PATH, json=CHAT, headers={"x-gateway-pin": name})
                assert answer.headers["x-gateway-replica"] == name
                assert answer.headers["x-gateway-reason"] == "pinned"
            answer = await http.post(PATH, json=CHAT, headers={"x-gateway-pin": "nobody"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_replica")
        async with running_gateway(a, b) as running, client(running.url) as http:
            answers = [await http.post(PATH, json=CHAT, headers={"x-gateway-pin": f"replica-{i}"}) for i in (0, 1)]
            assert len({answer.headers["x-gateway-replica"] for answer in answers}) == 1


async def test_paths_that_leave_v1_reach_no_engine():
    async with FaultEngine(ok) as engine, running_gateway(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        for path in (b"/v1/../reset_prefix_cache", b"/v1/%2e%2e/reset_prefix_cache", b"/v1//x", b"/v1/\xc3\xa9"):
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps(CHAT).encode()
            writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body))
            assert b" 400 " in await reader.readline()
            writer.close()
        assert not engine.calls


async def test_a_body_that_does_not_arrive_is_a_408():
    async with FaultEngine(ok) as engine, running_gateway(engine, body_timeout_s=0.2) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % PATH.encode())
        assert b" 408 " in await reader.readline()
        writer.close()
        await eventually(lambda: running.gateway.admission.admitted == 0)
        assert not engine.calls


async def test_a_very_long_reply_passes_whole():
    reply = {"choices": [], "usage": {"prompt_tokens": 1}, "text": "x" * (9 << 20)}

    async def handler(call: Call) -> None:
        if call.json.get("user") == "chunked":
            data = json.dumps(reply).encode()
            await call.start(b"application/json")
            for at in range(0, len(data), 1 << 20):
                await call.chunk(data[at : at + (1 << 20)])
            await call.end()
        else:
            await call.reply(200, reply)

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        for user in ("chunked", "sized"):
            answer = await http.post(PATH, json=CHAT | {"user": user})
            assert (answer.status_code, answer.json()) == (200, reply)
        assert running.loads() == {"replica-0": (0, 0)}


async def test_what_is_neither_json_nor_events_is_not_held_back():
    received = asyncio.Event()

    async def handler(call: Call) -> None:
        await call.start(b"application/x-ndjson")
        await call.chunk(b'{"a":1}\n')
        await received.wait()
        await call.chunk(b'{"a":2}\n')
        await call.end()

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        got = b""
        async with http.stream("POST", "/v1/audio/speech", json=CHAT) as response:
            async for data in response.aiter_raw():
                got += data
                received.set()
        assert got == b'{"a":1}\n{"a":2}\n'


@pytest.mark.parametrize("status", [600, 999])
async def test_an_impossible_status_is_a_502(status):
    async def handler(call: Call) -> None:
        await call.reply(status, {})

    async with FaultEngine(handler) as engine, running_gateway(engine) as running, client(running.url) as http:
        answer = await http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_protocol")


async def test_an_impossible_usage_is_ignored():
    async def handler(call: Call) -> None:
        await call.reply(200, {"choices": [], "usage": {"prompt_tokens": -5, "completion_tokens": 1}})

    async with FaultEngine(handler) as engine, running_gateway(engine) as running:
        async with client(running.url) as http, client(running.admin_url) as admin:
            answer = await http.post(PATH, json=CHAT, headers={"x-request-id": "a/b"})
            assert answer.status_code == 200
            receipt = (await admin.get("/admin/receipts/a/b")).json()
            assert (receipt["outcome"], receipt["cached_tokens"]) == ("ok", None)


async def test_a_made_up_model_is_not_kept():
    async with FaultEngine(ok) as engine, running_gateway(engine) as running:
        async with client(running.url) as http, client(running.admin_url) as admin:
            answer = await http.post(PATH, json=CHAT | {"model": "x" * 100_000})
            assert answer.status_code == 404
            assert len(answer.content) < 1_000
            receipt = (await admin.get(f"/admin/receipts/{answer.headers['x-request-id']}")).json()
            assert (receipt["model"], receipt["outcome"]) == ("", "model_not_found")


async def test_a_request_head_is_bounded_in_size_and_time(monkeypatch):
    async with FaultEngine(ok) as engine, running_gateway(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")

        async def answer(*parts: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            got = b""
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                got = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            return got

        line = b"POST %s HTTP/1.1\r\nhost: x\r\n" % PATH.encode()
        long = await answer(line, *[b"x-filler: " + b"y" * 30_000] * 30)
        assert long == b"" or b" 431 " in long.split(b"\r\n")[0]
        invalid = await answer(b"\x00\x01 nonsense\r\n\r\n")
        assert b" 400 " in invalid.split(b"\r\n")[0]
        assert json.loads(invalid.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
        for opening in (b"", b"POST /v1", line):
            late = await answer(opening)
            assert json.loads(late.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_timeout", opening
        async with client(running.url) as http:
            for _ in range(3):
                assert (await http.post(PATH, json=CHAT)).status_code == 200
        assert len(engine.calls) == 3


async def test_a_connection_is_used_again_after_its_head_timer_ran(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.6)  # longer than a head may take: the timer must not run while an answer is awaited
        await call.chat()

    async with FaultEngine(slow) as engine, running_gateway(engine) as running, client(running.url) as http:
        for _ in range(2):
            assert (await http.post(PATH, json=CHAT)).status_code == 200

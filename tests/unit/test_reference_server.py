"""The endpoints over real HTTP, with the engine in the test's own process."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zmq.asyncio
from reference_support import client, fold, metric, replay, settings, sse, tiny_directory, until

from replica_agent.reference.runtime import Opened, running

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
CHAT = [{"role": "user", "content": "the people of the world " * 8}]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client() as (http, _):
        yield http


def text(seed: int, words: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(("the", "water", "koba", "time", "luso", "pegu")) for _ in range(words))


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=GREEDY | {"max_tokens": 16, "ignore_eos": True} | body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_stream_says_what_the_whole_answer_says(http: httpx.AsyncClient) -> None:
    body = GREEDY | {"messages": CHAT, "max_tokens": 24, "ignore_eos": True}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    response = await http.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *events, end = await sse(response)
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    streamed = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    choice = whole["choices"][0]
    assert streamed == choice["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    prompt = whole["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": (prompt - 1) // 16 * 16}


async def test_the_openai_client_reads_it(http: httpx.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        assert [model.id for model in (await sdk.models.list()).data] == ["tiny"]
        answer = await sdk.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=5, n=2)  # type: ignore[call-overload]
        assert [choice.index for choice in answer.choices] == [0, 1]
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.completions.create(model="other", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as long:
            await sdk.completions.create(model="tiny", prompt=[5] * 5000)
        assert long.value.code == "context_length_exceeded"


async def test_cached_tokens_follow_the_cache(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": text(1)})).json()["tokens"]

    async def cached(**body: Any) -> int:
        return int((await complete(http, **body))["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached(prompt=tokens) == 0
    assert await cached(prompt=text(1)) == (len(tokens) - 1) // 16 * 16
    assert await cached(prompt=[*tokens[:32], *reversed(tokens[32:])]) == 32
    assert await cached(prompt=tokens, cache_salt="tenant") == 0
    assert await cached(prompt=tokens, cache_salt="tenant") > 0
    assert await metric(http, "vllm:prefix_cache_hits_total") > 0
    assert (await http.post("/reset_prefix_cache")).status_code == 200
    assert await cached(prompt=tokens) == 0


async def test_several_prompts_and_choices_keep_their_order(http: httpx.AsyncClient) -> None:
    prompts = [text(seed) for seed in range(3)]
    alone = [(await complete(http, prompt=prompt))["choices"][0]["text"] for prompt in prompts]
    together = await complete(http, prompt=prompts, n=2)
    assert [choice["text"] for choice in together["choices"]] == [each for each in alone for _ in range(2)]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))


async def test_a_stop_string_cuts_across_tokens(http: httpx.AsyncClient) -> None:
    whole = (await complete(http, prompt=text(3), max_tokens=30))["choices"][0]["text"]
    middle = len(whole) // 2
    # Wherever it is cut, a stop of some characters begins and ends within tokens.
    for start in range(middle, middle + 6):
        stop = whole[start : start + 5]
        choice = (await complete(http, prompt=text(3), max_tokens=30, stop=[stop, "absent"]))["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"


async def test_a_seed_repeats_and_temperature_varies(http: httpx.AsyncClient) -> None:
    async def sample(**body: Any) -> str:
        return str((await complete(http, prompt=text(4), temperature=1.5, **body))["choices"][0]["text"])

    assert await sample(seed=1) == await sample(seed=1) != await sample(seed=2)
    assert await sample() != await sample()


async def test_any_eos_of_the_model_ends_an_answer(http: httpx.AsyncClient, tmp_path: Path) -> None:
    whole = (await complete(http, prompt=text(5), max_tokens=8))["choices"][0]["text"]
    first = (await complete(http, prompt=text(5), max_tokens=1))["choices"][0]["text"]
    (token,) = (await http.post("/tokenize", json={"prompt": first})).json()["tokens"]
    # The same model, but for which token ends a text.
    model = shutil.copytree(tiny_directory(), tmp_path / "other")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, token]}))
    async with client(model=str(model)) as (other, _):
        body = {"model": "other", "prompt": text(5), "max_tokens": 8}
        ended = await complete(other, ignore_eos=False, **body)
        assert ended["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        assert ended["usage"]["completion_tokens"] == 1
        assert (await complete(other, **body))["choices"][0]["text"] == whole


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"echo": True}, "echo"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [5, 9999]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [5.5]}, "prompt[0]"),
    ],
)
async def test_bad_values_are_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/completions", json=GREEDY | {"prompt": "x"} | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "wizard", "content": "x"}], "messages"),
    ],
)
async def test_bad_messages_are_refused_by_name(http: httpx.AsyncClient, messages: object, param: str) -> None:
    response = await http.post("/v1/chat/completions", json=GREEDY | {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_nulls_and_unknown_fields_do_no_harm(http: httpx.AsyncClient) -> None:
    nulls = dict.fromkeys(
        ("max_completion_tokens", "top_p", "top_k", "stop", "n", "seed", "stream", "tools", "logprobs", "cache_salt")
    )
    body = GREEDY | nulls | {"messages": CHAT, "max_tokens": 2, "no_such_field": {"a": 1}, "frequency_penalty": 0}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_errors_outside_the_endpoints_are_openai_shaped(http: httpx.AsyncClient) -> None:
    for response, status in (
        (await http.get("/nowhere"), 404),
        (await http.get("/v1/completions"), 405),
        (await http.post("/v1/completions", content=b"{"), 400),
        (await http.post("/v1/completions", content=b"\xff"), 400),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_request_ids_are_echoed_or_made(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    made = {(await http.get("/nowhere")).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


async def test_tokenize_gives_the_ids_that_a_chat_uses(http: httpx.AsyncClient) -> None:
    messages = [
        {"role": "system", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "water"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"messages": messages, "tools": tools}
    tokenized = (await http.post("/tokenize", json=asked)).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 4096
    rendered = (await http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()["prompt"]
    assert rendered == (
        '<|bos|><|system|>\nTools:\n{"type": "function", "function": {"name": "f"}}\n<|end|>\n'
        "<|system|>\n<|end|>\n<|user|>\nthe\nwater<|end|>\n"
        '<|assistant|>\n\n<call>{"name": "f", "arguments": {"a": 1}}</call><|end|>\n'
        "<|tool|>\nok<|end|>\n<|assistant|>\n"
    )
    answer = (await http.post("/v1/chat/completions", json=GREEDY | asked | {"max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens"] == tokenized["count"]
    same = await complete(http, prompt=tokenized["tokens"])
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokenized["count"] - 1) // 16 * 16
    without = (await http.post("/tokenize", json=asked | {"add_generation_prompt": False})).json()
    assert tokenized["tokens"][: without["count"]] == without["tokens"]


async def test_the_final_message_can_be_continued(http: httpx.AsyncClient) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "the water"}]
    tokens = (await http.post("/tokenize", json={"messages": messages, "continue_final_message": True})).json()[
        "tokens"
    ]
    rendered = (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert rendered.endswith("<|assistant|>\nthe water")


async def test_the_model_card_and_metrics_describe_the_engine(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
    assert card["root"].endswith("tiny-v2")
    await complete(http, prompt=text(6))
    exposition = (await http.get("/metrics")).text
    assert 'block_size="16"' in exposition
    assert 'num_gpu_blocks="256"' in exposition
    assert await metric(http, "vllm:generation_tokens_total") == 16
    assert await metric(http, "vllm:time_to_first_token_seconds_count") == 1
    assert await metric(http, "vllm:request_success_total") == 1
    assert await metric(http, "process_start_time_seconds") > 0
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        await until(lambda name=name: is_zero(http, name))  # type: ignore[misc]


async def is_zero(http: httpx.AsyncClient, name: str) -> bool:
    return await metric(http, name) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_frees_everything(http: httpx.AsyncClient, stream: bool) -> None:
    body = GREEDY | {"prompt": text(7, 200), "max_tokens": 3000, "ignore_eos": True, "n": 2, "stream": stream}
    task = asyncio.create_task(http.post("/v1/completions", json=body))

    async def is_running() -> bool:
        return await metric(http, "vllm:num_requests_running") == 2

    await until(is_running)
    assert await metric(http, "vllm:kv_cache_usage_perc") > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_zero(http, "vllm:num_requests_running"))
    assert await metric(http, "vllm:kv_cache_usage_perc") == 0
    assert await metric(http, "vllm:generation_tokens_total") < 6000


async def test_events_add_up_to_the_engines_own_table() -> None:
    async with client(kv_tokens=640, max_num_seqs=4) as (http, engine):
        assert engine.publisher is not None
        assert engine.publisher.replay_endpoint is not None
        rng = random.Random(0)
        await asyncio.gather(*(complete(http, prompt=text(rng.randrange(8), rng.randint(20, 90))) for _ in range(40)))
        await complete(http, prompt=text(99), cache_salt="tenant")
        table = (await http.get("/debug/blocks")).json()
        with zmq.asyncio.Context() as context:
            batches = await replay(context, engine.publisher.replay_endpoint)
            assert [number for number, _ in batches] == list(range(len(batches)))
            events = [event for _, (_, events, rank) in batches for event in events if rank == 0]
            assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved"}
            assert fold(events) == Counter({each["wire_hash"]: each["copies"] for each in table["blocks"]})
            assert [extra for event in events for extra in event.get("extra_keys", []) if extra] == [["tenant"]]
            assert (await http.post("/reset_prefix_cache")).status_code == 200
            await until(lambda: cleared(context, engine, len(batches)))
        assert (await http.get("/debug/blocks")).json()["blocks"] == []


async def test_a_client_that_leaves_in_its_own_request_is_no_defect(capfd: pytest.CaptureFixture[str]) -> None:
    async with client() as (http, _):
        _, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await http.get("/health")
        writer.close()
        await writer.wait_closed()
        await complete(http, prompt=text(1, 50))
    assert "Traceback" not in capfd.readouterr().err


async def test_a_debug_page_checks_the_engines_laws() -> None:
    async with client() as (http, engine):
        await complete(http, prompt=text(1, 50))
        page = (await http.get("/debug/check")).json()
        assert page == {"running": 0, "waiting": 0, "used_blocks": 0, "loaded_blocks": 0, "failed_blocks": 0}
        core = engine.service.engine
        await asyncio.wrap_future(core.call(lambda: core.pool.allocate(1)))  # for nobody
        response = await http.get("/debug/check")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "broken_law")
        assert response.json()["error"]["message"] == "0 blocks in tables, 1 in use"
    async with client(debug=False) as (http, _):
        assert (await http.get("/debug/check")).status_code == 404


async def cleared(context: zmq.asyncio.Context, engine: Opened, start: int) -> bool:
    assert engine.publisher is not None
    assert engine.publisher.replay_endpoint is not None
    batches = await replay(context, engine.publisher.replay_endpoint, start)
    return [events for _, (_, events, _) in batches] == [[{"type": "AllBlocksCleared"}]]


async def test_output_depends_on_neither_cache_nor_company() -> None:
    rng = random.Random(0)
    shared = text(100, 80)
    prompts = [(shared if number % 2 else "") + text(number, rng.randint(1, 120)) for number in range(30)]
    alone = []
    async with client(prefill_chunk=512) as (http, _):
        for prompt in prompts:
            await http.post("/reset_prefix_cache")
            alone.append((await complete(http, prompt=prompt, max_tokens=40))["choices"][0]["text"])
    # Small chunks and few blocks: every mixture of prefill, decode, hit and preemption occurs.
    async with client(prefill_chunk=96, kv_tokens=1024) as (http, _):
        order = list(range(30)) * 2
        rng.shuffle(order)
        answers = await asyncio.gather(*(complete(http, prompt=prompts[number], max_tokens=40) for number in order))
        assert await metric(http, "vllm:prefix_cache_hits_total") > 0
        assert await metric(http, "vllm:num_preemptions_total") > 0
    for number, answer in zip(order, answers, strict=True):
        assert answer["choices"][0]["text"] == alone[number]


async def test_stopping_ends_open_streams_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    events: list[str] = []

    async def read(url: str, begun: asyncio.Event) -> None:
        body = GREEDY | {"prompt": text(8), "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                begun.set()
                events.append(line)

    async with running(settings()) as engine:
        begun = asyncio.Event()
        reader = asyncio.create_task(read(engine.url, begun))
        await asyncio.wait_for(begun.wait(), 60)
    await asyncio.wait_for(reader, 60)
    last = [event for event in events if event][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith(("compute", "kv-events", "tokenize"))}


async def test_a_failed_step_fails_its_requests_and_the_health() -> None:
    async with client() as (http, engine):
        broken = RuntimeError("no more memory")

        def fail() -> None:
            def forward(spans: object, interrupt: object) -> None:
                raise broken

            engine.service.engine._model.forward = forward  # type: ignore[method-assign,assignment]

        await asyncio.wrap_future(engine.service.engine.call(fail))
        response = await http.post("/v1/completions", json=GREEDY | {"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/completions", json=GREEDY | {"prompt": "x"})).status_code == 503

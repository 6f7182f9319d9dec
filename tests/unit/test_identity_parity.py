"""The check against an engine; transformers stands where its /tokenize would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from identity_support import chat, identifying, judge, model_files

from gateway.errors import IdentityUnavailable
from gateway.identity.chat import Dialect
from gateway.identity.identifier import Identifier
from gateway.identity.parity import check, probe_requests, sample
from gateway.identity.prompt import IdentityMode
from gateway.identity.status import NOT_TRIED, PromptKind

Engine = Callable[[dict[str, Any]], list[int]]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return judge("tiny")


def engine(tokenizer: Any, *, vllm: bool) -> Engine:
    """Tokenizes bodies with transformers after rewriting them as vLLM does, or hardly at all."""

    def tokenize(body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return list(tokenizer(body["prompt"])["input_ids"])
        messages = json.loads(json.dumps(body["messages"]))
        tools = body.get("tools")
        if vllm and tools:
            tools = [
                {
                    "type": "function",
                    "function": {key: tool["function"].get(key) for key in ("name", "description", "parameters")},
                }
                for tool in tools
            ]
        for message in messages:
            content = message["content"]
            message["content"] = (
                "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
            )
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                name = call["function"]["name"]
                call["function"] = (
                    {"arguments": arguments, "name": name} if vllm else {"name": name, "arguments": arguments}
                )
        return list(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False))

    return tokenize


def refusal(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://engine/tokenize")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


async def run(identifier: Identifier, tokenize: Engine) -> Any:
    async def post(body: dict[str, Any]) -> list[int]:
        json.dumps(body)
        return tokenize(body)

    return await check(identifier, "tiny", post)


@pytest.mark.parametrize("vllm", [True, False], ids=["vllm", "plain"])
async def test_the_engine_s_dialect_is_found_out(tiny: Any, vllm: bool) -> None:
    async with identifying(model_files("tiny")) as identifier:
        report = await run(identifier, engine(tiny, vllm=vllm))
        assert report.ok, str(report)
        assert report.mismatches == ()
        assert report.dialect is (Dialect.VLLM if vllm else Dialect.PLAIN)
        assert (report.off, report.compared, report.refused) == (frozenset(), len(probe_requests("tiny")), 0)
        assert identifier.modes()["tiny"].dialect is report.dialect
        # Another engine of the model that rewrites differently is not believed over the first.
        other = await run(identifier, engine(tiny, vllm=not vllm))
        assert not other.ok
        assert identifier.modes()["tiny"].dialect is report.dialect


async def test_another_template_is_noticed(tiny: Any) -> None:
    async with identifying(
        model_files("tiny", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    ) as identifier:
        report = await run(identifier, engine(tiny, vllm=True))
        assert not report.ok
        assert "tokens, engine" in str(report)
        assert PromptKind.PROMPT not in report.off


async def test_another_tokenizer_is_noticed(tiny: Any) -> None:
    async with identifying(model_files("smollm2", served="tiny")) as identifier:
        report = await run(identifier, engine(tiny, vllm=True))
        assert not report.ok
        assert report.off == frozenset(PromptKind)


async def test_an_engine_that_ignores_tools_costs_tools_only(tiny: Any) -> None:
    exact = engine(tiny, vllm=True)
    async with identifying(model_files("tiny")) as identifier:
        report = await run(identifier, lambda body: exact({k: v for k, v in body.items() if k != "tools"}))
        assert report.ok
        assert report.off == {PromptKind.TOOLS}
        identifier.set_parity("tiny", report.ok, str(report))
        identifier.restrict("tiny", report.off)
        tools = [{"type": "function", "function": {"name": "f"}}]
        hello = [{"role": "user", "content": "hello"}]
        assert (await identifier.identify(chat(hello, model="tiny", tools=tools))).fallback == "no_parity"
        assert (await identifier.identify(chat(hello, model="tiny"))).mode is IdentityMode.EXACT


async def test_refused_probes_are_skipped_up_to_a_half(tiny: Any) -> None:
    exact = engine(tiny, vllm=True)

    def strict(body: dict[str, Any]) -> list[int]:
        if "prompt" in body or any(message["role"] == "tool" for message in body["messages"]):
            raise refusal(400)
        return exact(body)

    def closed(body: dict[str, Any]) -> list[int]:
        raise refusal(404)

    async with identifying(model_files("tiny")) as identifier:
        report = await run(identifier, strict)
        assert report.ok
        assert report.refused == 6
        assert report.off == {PromptKind.PROMPT}
        assert not (await run(identifier, closed)).ok


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_an_engine_that_fails_is_no_verdict(tiny: Any, status: int) -> None:
    exact = engine(tiny, vllm=True)

    def broken(body: dict[str, Any]) -> list[int]:
        if "tools" in body:
            raise refusal(status)
        return exact(body)

    async with identifying(model_files("tiny")) as identifier:
        with pytest.raises(httpx.HTTPStatusError):
            await run(identifier, broken)
        assert identifier.modes()["tiny"].off == frozenset()


async def test_a_gateway_that_does_not_get_to_tokenizing_gives_no_verdict(tiny: Any) -> None:
    """A worker that is killed at a deadline says nothing of token ids, nor does one that is being restarted."""
    exact = engine(tiny, vllm=True)
    slow = "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    files = model_files("tiny")
    async with identifying(model_files("tiny", template=slow + (files.chat_template or "")), deadline_s=0.5) as one:
        with pytest.raises(IdentityUnavailable) as unavailable:
            await run(one, exact)
        assert unavailable.value.reason in NOT_TRIED
        with pytest.raises(IdentityUnavailable):
            await run(one, exact)
        assert (one.dialect("tiny"), one.modes()["tiny"].off) == (None, frozenset())
    async with identifying() as nothing_loaded:
        with pytest.raises(IdentityUnavailable):
            await run(nothing_loaded, exact)


async def test_samples_compare_real_requests(tiny: Any) -> None:
    exact = engine(tiny, vllm=True)
    sent: list[dict[str, Any]] = []

    async def post(body: dict[str, Any]) -> list[int] | None:
        import msgspec

        sent.append(json.loads(msgspec.json.encode(body)))
        return exact(sent[-1])

    async def refuse(body: dict[str, Any]) -> None:
        return None

    request = chat([{"role": "user", "content": "hello"}], model="tiny")
    async with identifying(model_files("tiny")) as identifier:
        assert await sample(identifier, request, post) is True
        assert sent[0]["messages"] == [{"role": "user", "content": "hello"}]
        assert await sample(identifier, request, refuse) is None
        await identifier.load(model_files("tiny", template="{{ messages[0].content }}"))
        assert await sample(identifier, request, post) is False

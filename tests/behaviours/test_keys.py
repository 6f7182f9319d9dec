"""Behaviours of prompt identity: keys match what the engine shares, tokens match the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from identity_support import (
    CHATML_TOOLS,
    ENDLESS,
    HEADERS_AND_DATE,
    PARTS,
    TOOLS,
    TRACES,
    chat,
    completion,
    conversations,
    exact,
    identifying,
    judge,
    judged,
    model_files,
    turns,
)

from gateway.demo.cluster import Cluster
from gateway.identity.chat import Dialect
from gateway.identity.parity import check, sample
from gateway.identity.prompt import IdentityMode, PromptRequest
from kvstore.identity import Namespace

LONG = "The quick brown fox jumps over the lazy dog. " * 20
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Why?"}]


# keys_match_what_the_engine_shares


async def test_keys_match_what_the_engine_shares() -> None:
    """Whatever changes what an engine computes changes the first key; what does not, changes none."""
    models = [model_files("smollm2", template=CHATML_TOOLS, served=name) for name in ("smollm2", "other")]
    async with identifying(*models) as identifier:

        async def keys(request: PromptRequest) -> tuple[int, ...]:
            identity = await identifier.identify(request)
            assert identity.mode is IdentityMode.EXACT, identity.fallback
            assert len(identity.keys) == identity.tokens // 16
            return tuple(identity.keys)

        base = await keys(chat(CHAT))
        assert len(base) > 10
        same = [
            chat([{"role": "system", "content": [{"type": "text", "text": LONG}]}, CHAT[1]]),
            chat(CHAT, chat_template_kwargs={}, tools=[]),
            chat([{**CHAT[0], "unknown_field": 1}, CHAT[1]]),
        ]
        for request in same:
            assert await keys(request) == base
        apart = [
            chat([{**CHAT[0], "role": "user"}, CHAT[1]]),
            chat(CHAT, tools=TOOLS),
            chat(CHAT, model="other"),
            chat(CHAT, lora="adapter"),
            chat(CHAT, salt="tenant"),
            chat([{**CHAT[0], "content": "!" + LONG}, CHAT[1]]),
        ]
        found = [base, *[await keys(request) for request in apart]]
        assert len(set(found)) == len(found)
        # This template puts tools behind the system message; all else stands in the first unit.
        assert len({keys_[0] for keys_ in found}) == len(found) - 1
        assert all(keys_[len(base) - 1] != base[-1] for keys_ in found[1:])
        # Template kwargs count where the template uses them: here, at the end.
        thinking, not_thinking = [
            await keys(chat(CHAT, chat_template_kwargs={"enable_thinking": on})) for on in (True, False)
        ]
        assert thinking == base
        assert not_thinking[: len(base)] == base
        longer = await keys(chat([*CHAT, {"role": "assistant", "content": LONG}, CHAT[1]]))
        shared = sum(left == right for left, right in zip(longer, base, strict=False))
        assert shared >= len(base) - 1


async def test_keys_match_what_the_engine_shares_token_ids_and_text_agree() -> None:
    async with identifying(model_files("smollm2"), model_files("tiny")) as identifier:
        for model in ("smollm2", "tiny"):
            text = f"{LONG}<|im_end|> and <|user|>\n你好"
            ids = await identifier.token_ids(completion(text, model=model))
            assert len(ids) > 100
            by_text = await identifier.identify(completion(text, model=model))
            for prompt in (ids, [ids], [ids, [1, 2, 3]]):
                by_ids = await identifier.identify(completion(prompt, model=model))
                assert by_ids.mode is IdentityMode.EXACT
                assert (by_ids.keys, by_ids.tokens) == (by_text.keys, by_text.tokens)
            rendered = await identifier.token_ids(chat(CHAT, model=model))
            as_chat = await identifier.identify(chat(CHAT, model=model))
            assert (await identifier.identify(completion(rendered, model=model))).keys == as_chat.keys
        huge = list(range(1000)) * 60
        assert len(json.dumps(huge)) > 256 * 1024
        identity = await identifier.identify(completion(huge, model="no such model"))
        assert (identity.mode, identity.tokens, len(identity.keys)) == (IdentityMode.EXACT, 60_000, 3750)


async def test_keys_match_what_the_engine_shares_in_any_form_of_content() -> None:
    text, parts = [{"type": "text", "text": LONG}], [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]
    alike: list[tuple[Any, ...]] = [("", None, [], [{"type": "text", "text": ""}]), (LONG, text, [LONG])]
    alike.append((f"{LONG}\n{LONG}", parts, [LONG, LONG]))
    async with identifying(model_files("smollm2")) as identifier:
        for role in ("user", "assistant", "system"):
            for contents in alike:
                found = []
                for content in contents:
                    identity = await identifier.identify(chat([{"role": role, "content": content, "tool_calls": []}]))
                    assert identity.mode is IdentityMode.EXACT
                    found.append((identity.tokens, identity.keys.tobytes()))
                assert len(set(found)) == 1
        missing = await identifier.identify(chat([{"role": "user"}]))
        assert missing.keys == (await identifier.identify(chat([{"role": "user", "content": ""}]))).keys


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    "x",
    "",
    [],
    {},
    [None],
    [[]],
    [{}],
    [[1, "a"]],
    [[-1]],
    [1, True],
    [1.5],
    [2**40],
    "\ud800",
]


async def test_keys_match_what_the_engine_shares_for_any_body() -> None:
    """Bodies that no engine accepts, and 4 MB ones, are identified all the same."""
    async with identifying(model_files("smollm2"), deadline_s=30) as identifier:
        for odd in ODD:
            requests = [
                chat(odd),
                chat([odd]),
                chat([{"role": odd, "content": odd}]),
                chat([{"role": "user", "content": odd}], tools=odd, documents=odd, chat_template_kwargs=odd),
                chat([{"role": "assistant", "tool_calls": odd}, {"role": "user", "content": [odd]}]),
                chat([{"role": "assistant", "tool_calls": [{"function": odd}, {"function": {"arguments": odd}}]}]),
                completion(odd),
            ]
            for request in requests:
                identity = await identifier.identify(request)
                assert identity.mode is IdentityMode.EXACT or identity.fallback, request
        megabytes = 'naïve text \U0001f600 \\ " \n' * 110_000
        assert len(json.dumps(megabytes)) > 4_000_000
        for request in (
            chat([{"role": "user", "content": megabytes}]),
            chat([{"role": "user", "content": "x"}] * 100_000),
            completion([7] * 1_400_000),
            PromptRequest(model="smollm2", namespace=Namespace("smollm2"), messages=b"[" * 4_000_000),
        ):
            identity = await identifier.identify(request)
            assert identity.mode is IdentityMode.EXACT or identity.fallback in ("deadline", "bad_request", "restarting")
        for request in (chat(CHAT, model="unknown"), chat([{"role": "user", "content": megabytes}], model="unknown")):
            assert (await identifier.identify(request)).mode is IdentityMode.TEXT


# tokens_match_the_engine


@pytest.fixture(scope="module")
def judges() -> dict[str, Any]:
    return {name: judge(name) for name in ("smollm2", "tiny")}


async def compare(
    files: Any, tokenizer: Any, template: str | None, chats: list[list[dict[str, Any]]], **extra: Any
) -> int:
    """Compares every message list; returns how many there were."""
    count = 0
    async with identifying(files) as identifier:
        for messages in chats:
            request = chat(messages, model=files.model, **extra)
            ours = await identifier.token_ids(request, Dialect.PLAIN)
            assert ours == judged(tokenizer, messages, template, **extra), messages[-1]
            count += 1
        assert identifier.stats.cache.hits > count // 2  # earlier turns come from the cache
    return count


@pytest.mark.parametrize("fixture", ["tau_airline_10.jsonl", "oasst_10.jsonl"])
@pytest.mark.parametrize("name", ["smollm2", "tiny"])
async def test_tokens_match_the_engine(name: str, fixture: str, judges: dict[str, Any]) -> None:
    chats = [turn for conversation in conversations(fixture) for turn in turns(conversation)]
    assert await compare(model_files(name), judges[name], None, chats) == {"t": 120, "o": 19}[fixture[0]]


@pytest.mark.parametrize("template", [CHATML_TOOLS, HEADERS_AND_DATE, PARTS], ids=["chatml", "headers", "parts"])
async def test_tokens_match_the_engine_with_other_templates(template: str, judges: dict[str, Any]) -> None:
    chats = [turn for conversation in conversations("tau_airline_10.jsonl")[:3] for turn in turns(conversation)]
    await compare(model_files("smollm2", template=template), judges["smollm2"], template, chats, tools=TOOLS)


@pytest.mark.parametrize("trace", ["tau_airline_chat_a.jsonl.gz", "oasst_chat_a.jsonl.gz"])
async def test_tokens_match_the_engine_on_whole_traces(trace: str, judges: dict[str, Any]) -> None:
    if not (TRACES / trace).exists():
        pytest.skip("the traces are not on this machine")
    chats = [list(turns(conversation))[-1] for conversation in conversations(trace)]
    assert await compare(model_files("smollm2"), judges["smollm2"], None, chats) == len(chats) >= 100


@pytest.mark.slow
async def test_tokens_match_the_engine_on_every_turn_of_a_trace(judges: dict[str, Any]) -> None:
    if not (TRACES / "tau_airline_chat_a.jsonl.gz").exists():
        pytest.skip("the traces are not on this machine")
    chats = [turn for conversation in conversations("tau_airline_chat_a.jsonl.gz") for turn in turns(conversation)]
    assert await compare(model_files("smollm2"), judges["smollm2"], None, chats) > 1000


async def test_tokens_match_the_engine_s_own_tokenize(cluster: Cluster) -> None:
    """Against a running engine: all probes, then every turn of real conversations, sampled as in service."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client, identifying(model_files("tiny")) as identifier:

        async def tokenize(body: dict[str, Any]) -> list[int]:
            headers = {"content-type": "application/json"}
            content = msgspec.json.encode(body)
            response = await client.post(f"{cluster.engine_url(0)}/tokenize", content=content, headers=headers)
            response.raise_for_status()
            tokens: list[int] = response.json()["tokens"]
            return tokens

        report = await check(identifier, "tiny", tokenize)
        assert report.ok, str(report)
        assert report.off == frozenset(), str(report)
        chats = [turn for conversation in conversations("tau_airline_10.jsonl") for turn in turns(conversation)]
        for messages in chats[::4]:
            assert await sample(identifier, chat(messages, model="tiny", tools=TOOLS), tokenize) is True


async def test_tokens_match_the_engine_or_the_request_is_text() -> None:
    """A template past its deadline costs that request its exactness and the worker its life, and nothing more."""
    async with identifying(model_files("smollm2", template=ENDLESS), deadline_s=1.0) as identifier:
        good = chat([{"role": "user", "content": LONG}])
        before = await identifier.identify(good)
        assert before.mode is IdentityMode.EXACT
        pids = identifier.worker_pids
        stuck = await identifier.identify(chat([{"role": "user", "content": "spin " + LONG}]))
        assert (stuck.mode, stuck.fallback) == (IdentityMode.TEXT, "deadline")
        assert len(stuck.keys) > 2
        after = await exact(identifier, good)
        assert after.keys == before.keys
        assert identifier.worker_pids != pids
        assert identifier.stats.deadline_kills == 1
        assert identifier.stats.fallbacks["deadline"] >= 1


async def test_tokens_match_the_engine_while_others_wait_behind_an_endless_template() -> None:
    """Requests behind one that never ends are answered by text within the deadline."""
    async with identifying(model_files("smollm2", template=ENDLESS), deadline_s=1.0) as identifier:
        clock = asyncio.get_running_loop().time
        began = clock()
        spin = asyncio.create_task(identifier.identify(chat([{"role": "user", "content": "spin"}])))
        await asyncio.sleep(0)
        behind = await asyncio.gather(*(identifier.identify(chat(CHAT)) for _ in range(5)))
        assert {identity.mode for identity in (*behind, await spin)} == {IdentityMode.TEXT}
        assert clock() - began < 20
        assert {identity.fallback for identity in behind} <= {"deadline", "restarting"}

"""The identifier on real worker processes: life, death, limits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from identity_support import ENDLESS, SEED, chat, completion, exact, identifying, lose_while_loading, model_files

from gateway.errors import IdentityUnavailable
from gateway.identity.identifier import STRIKES, SUSPENSION_SECONDS, Identifier
from gateway.identity.process import WorkerProcess
from gateway.identity.prompt import IdentityMode, PromptRequest
from gateway.identity.protocol import Identify, Reply, Request
from gateway.identity.status import REASONS, PromptKind
from kvstore.identity import Namespace, token_keys

HELLO = [{"role": "user", "content": "Hello, world! " * 30}]


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_keys_are_those_of_the_token_ids() -> None:
    async with identifying(model_files("smollm2")) as identifier:
        request = chat(HELLO, salt="tenant")
        identity = await identifier.identify(request)
        ids = await identifier.token_ids(request)
        assert identity.mode is IdentityMode.EXACT
        assert (identity.tokens, identity.fallback, identity.unit_tokens) == (len(ids), "", 16)
        assert identity.keys == token_keys(Namespace("smollm2", "", "tenant").root(SEED), ids)


async def test_text_until_loaded_and_after_unloading() -> None:
    async with identifying() as identifier:
        assert (await identifier.identify(chat(HELLO))).fallback == "no_tokenizer"
        loaded = await identifier.load(model_files("smollm2"))
        assert (loaded.segmented, loaded.whole_because, loaded.chat) == (True, "", True)
        assert (await identifier.identify(chat(HELLO))).mode is IdentityMode.EXACT
        assert identifier.modes()["smollm2"].mode is IdentityMode.EXACT
        await identifier.unload("smollm2")
        assert (await identifier.identify(chat(HELLO))).fallback == "no_tokenizer"
        assert identifier.modes() == {}
        assert identifier.stats.fallbacks == {"no_tokenizer": 2}
        assert identifier.stats.exact == 1


async def test_an_adapter_uses_the_files_of_its_base() -> None:
    async with identifying(model_files("tiny")) as identifier:
        namespace = Namespace("tiny", lora="my-adapter")
        request = PromptRequest(model="my-adapter", namespace=namespace, messages=chat(HELLO).messages)
        assert (await identifier.identify(request)).mode is IdentityMode.EXACT


async def test_new_files_replace_old_ones() -> None:
    async with identifying(model_files("tiny")) as identifier:
        first = await identifier.load(model_files("tiny"))
        before = await identifier.token_ids(chat(HELLO, model="tiny"))
        identifier.set_parity("tiny", ok=False, why="differs")
        second = await identifier.load(model_files("tiny", template="{{ messages[0].content }}"))
        assert first.digest != second.digest
        assert await identifier.token_ids(chat(HELLO, model="tiny")) != before
        assert identifier.modes()["tiny"].mode is IdentityMode.EXACT


async def test_without_parity_a_model_is_text() -> None:
    async with identifying(model_files("tiny")) as identifier:
        identifier.set_parity("tiny", ok=False, why="replica-1: 3 tokens, engine 4")
        assert (await identifier.identify(chat(HELLO, model="tiny"))).fallback == "no_parity"
        mode = identifier.modes()["tiny"]
        assert (mode.mode, mode.why) == (IdentityMode.TEXT, "replica-1: 3 tokens, engine 4")
        assert await identifier.token_ids(chat(HELLO, model="tiny"))
        identifier.set_parity("tiny", ok=True)
        assert (await identifier.identify(chat(HELLO, model="tiny"))).mode is IdentityMode.EXACT
        identifier.set_parity("nobody", ok=False)


async def test_kinds_can_be_switched_off_apart() -> None:
    async with identifying(model_files("tiny")) as identifier:
        identifier.restrict("tiny", [PromptKind.TOOLS])
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await identifier.identify(chat(HELLO, model="tiny", tools=tools))).fallback == "no_parity"
        assert (await identifier.identify(chat(HELLO, model="tiny", tools=[]))).mode is IdentityMode.EXACT
        assert (await identifier.identify(completion("hello", model="tiny"))).mode is IdentityMode.EXACT
        identifier.restrict("tiny", [PromptKind.PROMPT])
        assert (await identifier.identify(completion("hello", model="tiny"))).fallback == "no_parity"
        assert (await identifier.identify(chat(HELLO, model="tiny", tools=tools))).mode is IdentityMode.EXACT
        assert identifier.modes()["tiny"].off == {PromptKind.PROMPT}


async def test_unusable_files_are_refused_and_harm_nothing() -> None:
    async with identifying(model_files("tiny")) as identifier:
        for template, tokenizer, reason in (("{% for %}", None, "bad_template"), (None, b"{}", "bad_tokenizer")):
            files = model_files("smollm2", template=template)
            if tokenizer is not None:
                files = type(files)(
                    model="smollm2", tokenizer_json=tokenizer, chat_template="", special_tokens={}, digest="bad"
                )
            with pytest.raises(IdentityUnavailable) as refusal:
                await identifier.load(files)
            assert refusal.value.reason == reason
            assert (await identifier.identify(chat(HELLO))).fallback == "no_tokenizer"
            assert identifier.modes()["smollm2"].why == f"{reason}: {refusal.value}"
        assert (await identifier.identify(chat(HELLO, model="tiny"))).mode is IdentityMode.EXACT
        assert identifier.stats.worker_starts == 1


async def test_a_model_without_a_template_serves_prompts() -> None:
    files = model_files("tiny")
    bare = type(files)(
        model="tiny", tokenizer_json=files.tokenizer_json, chat_template=None, special_tokens={}, digest="bare"
    )
    async with identifying(bare) as identifier:
        assert (await identifier.identify(chat(HELLO, model="tiny"))).fallback == "no_template"
        assert (await identifier.identify(completion("hello", model="tiny"))).mode is IdentityMode.EXACT


async def test_a_dead_worker_is_replaced_with_its_models() -> None:
    async with identifying(model_files("tiny"), model_files("smollm2")) as identifier:
        for _ in range(2):
            (pid,) = identifier.worker_pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: identifier.worker_pids not in ([pid], []))  # type: ignore[misc]
            for model in ("tiny", "smollm2"):
                await exact(identifier, chat(HELLO, model=model))
        stats = identifier.stats
        assert stats.worker_starts == 3
        assert set(stats.fallbacks) <= {"restarting", "worker_died"}


async def test_a_lane_that_fails_for_no_known_reason_goes_on_with_another_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with identifying(model_files("tiny")) as identifier:
        honest = WorkerProcess.call
        defects = [ValueError("a defect"), ValueError("another")]

        async def call(process: WorkerProcess, request: Request) -> Reply:
            if isinstance(request, Identify) and defects:
                raise defects.pop()
            return await honest(process, request)

        monkeypatch.setattr(WorkerProcess, "call", call)
        for starts in (2, 3):
            assert (await identifier.identify(chat(HELLO, model="tiny"))).fallback == "worker_died"
            await until(lambda starts=starts: identifier.stats.worker_starts == starts)  # type: ignore[misc]
            await until(lambda: identifier._lanes[0].live.is_set())
        await exact(identifier, chat(HELLO, model="tiny"))
        assert ("a defect" in caplog.text, "another" in caplog.text) == (True, True)


async def test_a_model_that_a_worker_died_of_while_loading_is_loaded_again_when_asked() -> None:
    files = model_files("tiny")
    async with identifying(files, model_files("smollm2")) as identifier:
        identifier.restrict("tiny", [PromptKind.PROMPT])
        await lose_while_loading(identifier, "tiny")
        await exact(identifier, chat(HELLO))
        mode = identifier.modes()["tiny"]
        assert (mode.mode, mode.why) == (IdentityMode.TEXT, "the identity worker does not survive loading it")
        assert (await identifier.identify(chat(HELLO, model="tiny"))).fallback == "worker_died"
        await identifier.load(files)
        await exact(identifier, chat(HELLO, model="tiny"))
        assert identifier.modes()["tiny"].off == {PromptKind.PROMPT}, "what was said of the same files holds"


async def test_a_crash_in_one_request_is_that_request_s() -> None:
    """A template that asks for more memory than there is must not take others down for long."""
    hungry = "{% set a = 'x' * 50000000 %}{% set b = a * 2000 %}{{ messages[0].content }}"
    async with identifying(model_files("tiny"), model_files("smollm2", template=hungry)) as identifier:
        assert (await identifier.identify(chat(HELLO))).fallback in ("template_error", "worker_died")
        await exact(identifier, chat(HELLO, model="tiny"))


async def test_a_model_that_keeps_killing_workers_is_left_alone() -> None:
    now = [0.0]
    files = model_files("smollm2", template=ENDLESS)
    async with identifying(files, model_files("tiny"), deadline_s=1.0, clock=lambda: now[0]) as identifier:
        spin = chat([{"role": "user", "content": "spin"}])
        for strike in range(STRIKES):
            assert (await identifier.identify(spin)).fallback == "deadline"
            await until(lambda strike=strike: identifier.stats.worker_starts >= strike + 2)  # type: ignore[misc]
            await exact(identifier, chat(HELLO, model="tiny"))
        assert identifier.stats.deadline_kills >= STRIKES
        assert (await identifier.identify(chat(HELLO))).fallback == "suspended"
        identifier.set_parity("smollm2", ok=True, why="not why it is text")
        assert identifier.modes()["smollm2"].why == "suspended"
        now[0] += SUSPENSION_SECONDS
        assert (await identifier.identify(chat(HELLO))).mode is IdentityMode.EXACT


async def test_what_waits_is_bounded() -> None:
    async with identifying(model_files("tiny"), queue=4) as identifier:
        found = await asyncio.gather(*(identifier.identify(chat(HELLO, model="tiny")) for _ in range(30)))
        reasons = [identity.fallback for identity in found]
        assert set(reasons) == {"", "busy"}
        assert reasons.count("") >= 4
        assert (await identifier.identify(chat(HELLO, model="tiny"))).mode is IdentityMode.EXACT


async def test_a_long_text_is_no_reason_to_kill_the_worker() -> None:
    """A request waits no longer than its deadline, but a worker is given time for its size, and the next turn hits."""
    async with identifying(model_files("smollm2"), deadline_s=0.05) as identifier:
        (pid,) = identifier.worker_pids
        request = chat(
            [{"role": "user", "content": "".join(f"{n} words and {n * n} numbers, " for n in range(20_000))}]
        )
        assert (await identifier.identify(request)).fallback == "deadline"
        async with asyncio.timeout(30):
            while (await identifier.identify(request)).mode is not IdentityMode.EXACT:
                pass
        assert identifier.worker_pids == [pid]
        assert identifier.stats.deadline_kills == 0


async def test_withdrawn_requests_leave_no_trace() -> None:
    async with identifying(model_files("tiny")) as identifier:
        tasks = [asyncio.create_task(identifier.identify(chat(HELLO, model="tiny"))) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in found[::2])
        assert {result.mode for result in found[1::2] if not isinstance(result, BaseException)} == {IdentityMode.EXACT}


async def test_several_workers_share_the_load() -> None:
    async with identifying(model_files("tiny"), workers=2) as identifier:
        assert len(identifier.worker_pids) == 2
        chats = [[{"role": "user", "content": f"{number} {'words ' * 50}"}] for number in range(24)]
        found = await asyncio.gather(*(identifier.identify(chat(each, model="tiny")) for each in chats))
        assert {identity.mode for identity in found} == {IdentityMode.EXACT}
        assert identifier.stats.cache.entries == 24


async def test_closing_fails_over_and_ends_the_workers() -> None:
    async with identifying(model_files("smollm2", template=ENDLESS)) as identifier:
        pids = identifier.worker_pids
        spinning = asyncio.create_task(identifier.identify(chat([{"role": "user", "content": "spin"}])))
        waiting = asyncio.create_task(identifier.identify(chat(HELLO)))
        await asyncio.sleep(0.05)
        await identifier.close()
        assert {(await spinning).fallback, (await waiting).fallback} == {"restarting"}
        assert (await identifier.identify(chat(HELLO))).fallback == "restarting"
        assert not any(map(alive, pids))


async def test_an_interrupt_does_not_reach_the_worker() -> None:
    async with identifying(model_files("tiny")) as identifier:
        (pid,) = identifier.worker_pids
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        assert (await identifier.identify(chat(HELLO, model="tiny"))).mode is IdentityMode.EXACT
        assert identifier.worker_pids == [pid]


async def test_no_secret_of_the_environment_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIX_GATEWAY_TOKEN", "hidden")
    async with identifying() as identifier:
        (pid,) = identifier.worker_pids
        assert b"hidden" not in Path(f"/proc/{pid}/environ").read_bytes()


_PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from identity_support import ENDLESS, chat, identifying, model_files
async def main():
    async with identifying(model_files("tiny", template=ENDLESS)) as identifier:
        spin = asyncio.create_task(identifier.identify(chat([{"role": "user", "content": "spin"}], model="tiny")))
        await asyncio.sleep(0)
        print(identifier.worker_pids[0], flush=True)
        await spin
asyncio.run(main())
"""


async def test_a_busy_worker_does_not_outlive_its_gateway() -> None:
    tests = str(Path(__file__).parents[1])
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, tests, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(pid))


async def test_a_worker_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    identifier = Identifier(SEED, load_deadline_s=0.3)
    with pytest.raises(IdentityUnavailable) as refusal:
        await identifier.start()
    assert refusal.value.reason == "worker_died"


def test_reasons_are_words() -> None:
    assert all(reason.replace("_", "").isalpha() for reason in REASONS)

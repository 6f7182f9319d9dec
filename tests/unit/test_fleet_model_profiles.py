"""A model is exact while every engine that was asked agrees. Real tokenizer, real worker, engines over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from agent_support import serving, until
from identity_support import chat, exact, identifying, lose_while_loading, model_files
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import IdentityUnavailable
from gateway.fleet.engine_health import EngineHealth
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.model_profiles import UNPROVEN, ModelProfiles
from gateway.fleet.replica import Replica
from gateway.identity import protocol
from gateway.identity.chat import Dialect
from gateway.identity.identifier import Identifier
from gateway.identity.lane import Job
from gateway.identity.process import WorkerProcess
from gateway.identity.prompt import IdentityMode
from gateway.identity.status import PromptKind
from gateway.settings import ReplicaSettings
from kvstore.messages import ModelFiles
from replica_agent.reference.chat import Tokenizer
from replica_agent.reference.errors import RequestError
from replica_agent.reference.prepare import prepare

FILES = model_files("tiny")
HELLO = chat([{"role": "user", "content": "hello"}], model="tiny")


class Engine:
    """`/tokenize` with the real tokenizer; `off_by_one` makes it another's, `odd_text` for such requests only. `serves`
    is the model that it names, none for an engine that is not up."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.off_by_one = False
        self.odd_text = "no request has this"
        self.answer: Response | None = None
        self.asked = 0
        self.serves: str | None = "tiny"
        tokenize = Route("/tokenize", self._tokenize, methods=["POST"])
        self.app = Starlette(routes=[tokenize, Route("/v1/models", self._models)])

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.serves}]}) if self.serves else JSONResponse({}, 503)

    async def _tokenize(self, request: Request) -> Response:
        self.asked += 1
        if self.answer is not None:
            return self.answer
        body = json.loads(await request.body())
        try:
            if "messages" in body:
                text = self._tokenizer.render(
                    body["messages"], tools=body.get("tools"), add_generation_prompt=body["add_generation_prompt"]
                )
                ids = self._tokenizer.encode(text, False)
            else:
                ids = self._tokenizer.encode(body["prompt"], True)
        except RequestError as error:
            return JSONResponse({"error": {"message": error.message}}, 400)
        odd = self.off_by_one or self.odd_text in json.dumps(body)
        return JSONResponse({"tokens": [token + odd for token in ids]})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(prepare("tiny"))


class Rig:
    """Profiles over one identifier, and three replicas with engines of their own."""

    def __init__(self, identifier: Identifier, engines: EngineHttp, sample_every: int, **options: Any) -> None:
        self.identifier = identifier
        self.profiles = ModelProfiles(identifier, engines, sample_every, prove_again_s=0.2, **options)
        self.health = EngineHealth(engines, on_down=lambda replica: None)
        self.engines: list[Engine] = []
        self.replicas: list[Replica] = []

    async def learn(self) -> None:
        """Every agent brings the files."""
        for replica in self.replicas:
            await self.profiles.learn(replica, FILES)

    async def serve(self, at: int, model: str | None) -> None:
        """An engine serves this model, or none, and that is noticed."""
        self.engines[at].serves = model
        await self.health.probe(self.replicas[at])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What went wrong is made good meanwhile."""
        task = asyncio.create_task(self.profiles.run())
        try:
            yield
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    @property
    def mode(self) -> tuple[IdentityMode, str]:
        state = self.identifier.modes().get("tiny")
        return (state.mode, state.why) if state is not None else (IdentityMode.TEXT, "no_tokenizer")


@contextlib.asynccontextmanager
async def rig(tokenizer: Tokenizer, sample_every: int = 0, **options: Any) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        identifier = await stack.enter_async_context(identifying())
        asking = EngineHttp()
        stack.push_async_callback(asking.close)
        made = Rig(identifier, asking, sample_every, **options)
        for at in range(3):
            engine = Engine(tokenizer, f"replica-{at}")
            url = await stack.enter_async_context(serving(engine.app))
            made.engines.append(engine)
            made.replicas.append(Replica(ReplicaSettings(id=engine.name, engine=url)))
            await made.health.probe(made.replicas[at])
        yield made
        await made.profiles.close()


async def test_a_model_that_no_replica_has_files_of_any_more_is_forgotten(tokenizer: Tokenizer) -> None:
    """Engines are restarted with other models, and agents may call them what they like."""
    async with rig(tokenizer) as made:
        first, second, _ = made.replicas
        for replica in (first, second):
            await made.profiles.learn(replica, FILES)
        await made.profiles.learn(first, msgspec.structs.replace(FILES, model="other"))
        assert set(made.identifier.modes()) == {"tiny", "other"}, "one still has it"
        await made.profiles.learn(second, msgspec.structs.replace(FILES, model="other"))
        assert set(made.identifier.modes()) == {"other"}
        await made.profiles.learn(first, FILES)
        assert set(made.identifier.modes()) == {"tiny", "other"}
        assert made.mode == (IdentityMode.EXACT, "")


async def test_three_replicas_learn_at_once(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        await asyncio.gather(*(made.profiles.learn(replica, FILES) for replica in made.replicas))
        assert made.mode == (IdentityMode.EXACT, "")
        assert all(engine.asked > 10 for engine in made.engines), "parity is proven with each"
        asked = [engine.asked for engine in made.engines]
        await asyncio.gather(*(made.profiles.learn(replica, FILES) for replica in made.replicas))
        assert asked == [engine.asked for engine in made.engines], "a stream that reconnects proves nothing again"
        identity = await exact(made.identifier, HELLO)
        text = tokenizer.render([{"role": "user", "content": "hello"}])
        assert identity.tokens == len(tokenizer.encode(text, False))


async def test_it_is_not_exact_before_an_engine_agreed(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.replicas[0].engine = httpx.URL(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(httpx.ConnectError):
            await made.profiles.learn(made.replicas[0], FILES)
        assert made.mode == (IdentityMode.TEXT, "not compared with an engine yet")
        made.engines[1].answer = JSONResponse({}, 500)
        with pytest.raises(httpx.HTTPStatusError):
            await made.profiles.learn(made.replicas[1], FILES)
        made.engines[1].answer = Response(b'{"tokens": ' + b"[" * 100_000)
        with pytest.raises(msgspec.ValidationError):
            await made.profiles.learn(made.replicas[1], FILES)
        assert made.mode[0] is IdentityMode.TEXT
        made.engines[1].answer = None
        await made.profiles.learn(made.replicas[1], FILES)
        assert made.mode == (IdentityMode.EXACT, "")


async def test_one_engine_that_disagrees_means_text_and_is_named(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[1].off_by_one = True
        for replica in made.replicas:
            await made.profiles.learn(replica, FILES)
        mode, why = made.mode
        assert mode is IdentityMode.TEXT
        assert why.startswith("replica-1: ")
        assert "mismatches: user: " in why
        identity = await made.identifier.identify(HELLO)
        assert (identity.mode, identity.fallback) == (IdentityMode.TEXT, "no_parity")
        made.engines[1].off_by_one = False
        await made.profiles.learn(made.replicas[2], FILES)
        assert made.mode[0] is IdentityMode.TEXT, "one that agrees does not outvote it"
        renewed = msgspec.structs.replace(FILES, digest="other files")
        for replica in made.replicas:
            await made.profiles.learn(replica, renewed)
        assert made.mode == (IdentityMode.EXACT, "")


async def test_an_engine_that_does_not_tokenize_proves_nothing(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[0].answer = JSONResponse({"detail": "Not Found"}, 404)
        await made.profiles.learn(made.replicas[0], FILES)
        mode, why = made.mode
        assert mode is IdentityMode.TEXT
        assert "refused by the engine" in why


async def test_files_that_cannot_be_used_leave_the_others_alone(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        broken = ModelFiles(model="broken", tokenizer_json=b"{}", chat_template=None, special_tokens={}, digest="d")
        await made.profiles.learn(made.replicas[0], broken)
        assert made.identifier.modes()["broken"].mode is IdentityMode.TEXT
        assert made.identifier.modes()["broken"].why.startswith("bad_tokenizer: ")
        await made.profiles.learn(made.replicas[0], FILES)
        assert made.mode == (IdentityMode.EXACT, "")


async def test_a_sampled_request_that_differs_means_text(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer, sample_every=2) as made:
        for replica in made.replicas:
            await made.profiles.learn(replica, FILES)
        made.profiles.sample(made.replicas[0], HELLO)
        assert made.profiles.samples == 0, "every second one"
        made.profiles.sample(made.replicas[0], HELLO)
        await until(lambda: made.profiles.samples == 1)
        assert made.mode == (IdentityMode.EXACT, "")
        made.engines[2].answer = JSONResponse({}, 503)
        asked = made.engines[2].asked
        for _ in range(2):
            made.profiles.sample(made.replicas[2], HELLO)
        await until(lambda: made.engines[2].asked == asked + 1)
        made.engines[2].answer = None
        made.engines[2].off_by_one = True

        def found() -> bool:
            made.profiles.sample(made.replicas[2], HELLO)
            return made.profiles.mismatches == 1

        await until(found)
        await until(lambda: made.mode[0] is IdentityMode.TEXT)
        assert made.mode[1].startswith("replica-2: ")


async def test_one_odd_request_of_a_client_decides_nothing_but_many_do(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer, sample_every=1) as made:
        for replica in made.replicas:
            await made.profiles.learn(replica, FILES)
        made.engines[0].odd_text = "strange"
        strange = chat([{"role": "user", "content": "strange"}], model="tiny")
        for count in (1, 2, 3):
            made.profiles.sample(made.replicas[0], strange)
            await until(lambda count=count: made.profiles.mismatches == count and made.profiles.idle)
            assert made.mode == (IdentityMode.EXACT, "")
        made.profiles.sample(made.replicas[0], strange)
        await until(lambda: made.mode[0] is IdentityMode.TEXT)
        assert made.mode[1] == "replica-0: 4 of the last 8 sampled requests differ"


async def test_an_engine_that_agrees_again_is_believed_again(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[1].off_by_one = True
        for replica in made.replicas:
            await made.profiles.learn(replica, FILES)
        assert made.mode[0] is IdentityMode.TEXT
        async with made.running():
            asked = made.engines[1].asked
            await until(lambda: made.engines[1].asked > asked)
            assert made.mode[0] is IdentityMode.TEXT
            made.engines[1].off_by_one = False
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))


async def test_an_engine_that_disagreed_does_not_count_while_it_is_down(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[0].off_by_one = made.engines[1].off_by_one = True
        await made.learn()
        assert made.mode[1].startswith("replica-0: ")
        async with made.running():
            await made.serve(0, None)
            await until(lambda: made.mode[1].startswith("replica-1: "))
            asked = made.engines[0].asked
            await made.serve(1, None)
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
            assert made.engines[0].asked == asked, "nobody asks an engine that is down"
            await made.serve(0, "tiny")
            await until(lambda: made.mode[1].startswith("replica-0: "))
            made.engines[0].off_by_one = False
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))


async def test_an_engine_that_disagreed_does_not_count_while_it_serves_another_model(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[0].off_by_one = True
        await made.learn()
        async with made.running():
            await made.serve(0, "other")
            made.engines[0].answer = JSONResponse({"detail": "no such model"}, 404)
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
            made.engines[0].answer = None
            await made.serve(0, "tiny")
            await until(lambda: made.mode[1].startswith("replica-0: "))


async def test_a_replica_that_brings_another_model_has_no_say_any_more(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[0].off_by_one = True
        await made.learn()
        assert made.mode[0] is IdentityMode.TEXT
        await made.profiles.learn(made.replicas[0], msgspec.structs.replace(FILES, model="other"))
        assert made.mode == (IdentityMode.EXACT, "")
        await made.profiles.learn(made.replicas[0], FILES)
        assert made.mode[1].startswith("replica-0: "), "it is asked again when it is back"


async def test_engines_that_all_speak_another_dialect_now_are_believed(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        await made.learn()
        spoken = made.identifier.modes()["tiny"].dialect
        other = next(dialect for dialect in Dialect if dialect is not spoken)
        made.identifier.set_dialect("tiny", other)
        made.profiles._profiles["tiny"].proofs.clear()
        await made.profiles.learn(made.replicas[0], FILES)
        assert made.mode == (IdentityMode.EXACT, "")
        assert made.identifier.modes()["tiny"].dialect is spoken


async def test_a_model_that_a_worker_died_of_while_loading_is_exact_again(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        await made.learn()
        asked = [engine.asked for engine in made.engines]
        await lose_while_loading(made.identifier, "tiny")
        await until(lambda: made.mode == (IdentityMode.TEXT, "the identity worker does not survive loading it"))
        async with made.running():
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
        await exact(made.identifier, HELLO)
        assert asked == [engine.asked for engine in made.engines], "the engines are the same, and so are the files"


async def test_a_model_that_could_not_be_loaded_is_loaded_in_the_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody brings the files a second time while the reports of a replica go on."""
    async with rig(tokenizer) as made:
        honest, tries = WorkerProcess.call, 0

        async def call(process: WorkerProcess, request: protocol.Request) -> protocol.Reply:
            nonlocal tries
            if isinstance(request, protocol.Load):
                tries += 1
                if tries <= 2:
                    return protocol.Failed("bad_tokenizer", "no room")
            return await honest(process, request)

        monkeypatch.setattr(WorkerProcess, "call", call)
        await made.learn()
        assert tries == 1, "not once for every replica"
        assert made.mode == (IdentityMode.TEXT, "bad_tokenizer: no room")
        async with made.running():
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
            await until(lambda: all(engine.asked > 10 for engine in made.engines))
        assert tries == 3
        await exact(made.identifier, HELLO)


async def test_loads_that_fail_are_tried_ever_more_seldom(tokenizer: Tokenizer) -> None:
    now = [0.0]
    async with rig(tokenizer, clock=lambda: now[0]) as made:
        broken = ModelFiles(model="broken", tokenizer_json=b"{}", chat_template=None, special_tokens={}, digest="d")
        await made.profiles.learn(made.replicas[0], broken)
        profile = made.profiles._profiles["broken"]
        waits = []
        for _ in range(8):
            waits.append(profile.load_from - now[0])
            now[0] = profile.load_from - 0.01
            assert not await made.profiles._load(profile)
            assert profile.failures == len(waits), "it is not time yet"
            now[0] = profile.load_from
            assert not await made.profiles._load(profile)
        assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.4, 2.4, 2.4, 2.4])


@pytest.mark.parametrize("status", [429, 503])
async def test_what_could_not_be_compared_is_compared_later(tokenizer: Tokenizer, status: int) -> None:
    async with rig(tokenizer) as made:
        await made.profiles.learn(made.replicas[0], FILES)
        made.engines[1].answer = JSONResponse({}, status)
        with pytest.raises(httpx.HTTPStatusError):
            await made.profiles.learn(made.replicas[1], FILES)
        assert made.mode == (IdentityMode.EXACT, "")
        made.engines[1].answer = None
        made.engines[1].off_by_one = True
        async with made.running():
            await until(lambda: made.mode[1].startswith("replica-1: "))


async def test_a_worker_that_is_away_says_nothing_of_token_ids(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        honest, tools = made.identifier._lanes[0].submit, 0

        def submit(job: Job) -> None:
            nonlocal tools
            if isinstance(job.request, protocol.Identify) and job.request.request.tools is not None and not tools:
                tools += 1
                raise IdentityUnavailable("restarting", "the identity worker is being restarted")
            honest(job)

        made.identifier._lanes[0].submit = submit  # type: ignore[method-assign]
        await made.profiles.learn(made.replicas[0], FILES)
        assert made.mode == (IdentityMode.TEXT, UNPROVEN)
        async with made.running():
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
        assert made.identifier.modes()["tiny"].off == frozenset()


async def test_kinds_that_differ_are_asked_again(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer) as made:
        made.engines[0].odd_text = '"tools"'
        made.engines[1].odd_text = '"prompt"'
        await made.learn()

        def off() -> frozenset[PromptKind]:
            return made.identifier.modes()["tiny"].off

        assert made.mode == (IdentityMode.EXACT, "")
        assert off() == {PromptKind.TOOLS, PromptKind.PROMPT}
        async with made.running():
            made.engines[0].odd_text = "no request has this"
            await until(lambda: off() == {PromptKind.PROMPT})
            await made.serve(1, None)
            await until(lambda: off() == frozenset())
            assert made.mode == (IdentityMode.EXACT, "")


async def test_no_samples_where_they_are_off(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer, sample_every=0) as made:
        await made.profiles.learn(made.replicas[0], FILES)
        asked = made.engines[0].asked
        for _ in range(300):
            made.profiles.sample(made.replicas[0], HELLO)
        await made.profiles.close()
        assert (made.profiles.samples, made.engines[0].asked) == (0, asked)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_whatever_went_wrong_is_made_good(tokenizer: Tokenizer, seed: int) -> None:
    """Engines differ, refuse, go, come back and serve other models, agents reconnect, the worker dies: once that is
    over, the model is exact, in all kinds of requests."""
    random = Random(seed)
    other = msgspec.structs.replace(FILES, model="other")
    async with rig(tokenizer) as made, made.running():
        for _ in range(12):
            at = random.randrange(3)
            engine, replica = made.engines[at], made.replicas[at]
            match random.choice(["differ", "odd", "refuse", "go", "move", "serve", "learn", "learn", "other", "lose"]):
                case "differ":
                    engine.off_by_one = not engine.off_by_one
                case "odd":
                    engine.odd_text = random.choice(['"tools"', '"prompt"', "no request has this"])
                case "refuse":
                    engine.answer = JSONResponse({}, random.choice([404, 429, 503])) if engine.answer is None else None
                case "go":
                    await made.serve(at, None)
                case "move":
                    await made.serve(at, "other")
                case "serve":
                    await made.serve(at, "tiny")
                case "lose":
                    for pid in made.identifier.worker_pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                case learn:
                    with contextlib.suppress(httpx.HTTPStatusError):
                        await made.profiles.learn(replica, other if learn == "other" else FILES)
            await asyncio.sleep(random.choice([0, 0, 0.1, 0.3]))
        for at, engine in enumerate(made.engines):
            engine.off_by_one, engine.odd_text, engine.answer = False, "no request has this", None
            await made.serve(at, "tiny")
        await made.learn()
        await until(lambda: made.mode == (IdentityMode.EXACT, ""))
        await until(lambda: made.identifier.modes()["tiny"].off == frozenset())
        await until(lambda: made.identifier.modes().keys() == {"tiny"})
        await exact(made.identifier, HELLO)

"""A model is exact while every engine that was asked agrees. Real tokenizer, real worker, engines over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from agent_support import serving, until
from identity_support import chat, exact, identifying, model_files
from loopback_ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.model_profiles import ModelProfiles
from gateway.fleet.replica import Replica
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode
from gateway.settings import ReplicaSettings
from kvstore.messages import ModelFiles
from replica_agent.reference.chat import Tokenizer
from replica_agent.reference.errors import RequestError
from replica_agent.reference.prepare import prepare

FILES = model_files("tiny")
HELLO = chat([{"role": "user", "content": "hello"}], model="tiny")


class Engine:
    """`/tokenize` with the real tokenizer; `off_by_one` makes it another's, `odd_text` for such requests only."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.off_by_one = False
        self.odd_text = "no request has this"
        self.answer: Response | None = None
        self.asked = 0
        self.app = Starlette(routes=[Route("/tokenize", self._tokenize, methods=["POST"])])

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

    def __init__(self, identifier: Identifier, engines: EngineHttp, sample_every: int) -> None:
        self.identifier = identifier
        self.profiles = ModelProfiles(identifier, engines, sample_every, prove_again_s=0.2)
        self.engines: list[Engine] = []
        self.replicas: list[Replica] = []

    @property
    def mode(self) -> tuple[IdentityMode, str]:
        state = self.identifier.modes()["tiny"]
        return state.mode, state.why


@contextlib.asynccontextmanager
async def rig(tokenizer: Tokenizer, sample_every: int = 0) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        identifier = await stack.enter_async_context(identifying())
        asking = EngineHttp()
        stack.push_async_callback(asking.close)
        made = Rig(identifier, asking, sample_every)
        for at in range(3):
            engine = Engine(tokenizer, f"replica-{at}")
            url = await stack.enter_async_context(serving(engine.app))
            made.engines.append(engine)
            made.replicas.append(Replica(ReplicaSettings(id=engine.name, engine=url)))
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
        assert "broken" not in made.identifier.modes()
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
        running = asyncio.create_task(made.profiles.run())
        try:
            asked = made.engines[1].asked
            await until(lambda: made.engines[1].asked > asked)
            assert made.mode[0] is IdentityMode.TEXT
            made.engines[1].off_by_one = False
            await until(lambda: made.mode == (IdentityMode.EXACT, ""))
        finally:
            running.cancel()


async def test_no_samples_where_they_are_off(tokenizer: Tokenizer) -> None:
    async with rig(tokenizer, sample_every=0) as made:
        await made.profiles.learn(made.replicas[0], FILES)
        asked = made.engines[0].asked
        for _ in range(300):
            made.profiles.sample(made.replicas[0], HELLO)
        await made.profiles.close()
        assert (made.profiles.samples, made.engines[0].asked) == (0, asked)

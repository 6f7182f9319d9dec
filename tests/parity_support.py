"""One model as the gateway tokenizes it and as its engine does, compared on what clients of recorded chats sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from gateway.identity import parity
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode, PromptRequest
from kvstore.identity import Namespace, token_keys
from kvstore.messages import ModelFiles

FIXTURES = Path(__file__).parent / "fixtures"
TRACES = Path(__file__).parents[1].parent / "shared" / "traces"
"""Whole traces, where they lie beside the checkout."""
SEED = 11
AT_ONCE = 4

Messages = list[dict[str, Any]]


def message_lists(path: Path) -> Iterator[Messages]:
    """What clients sent: every conversation up to each reply of the assistant, and to its end."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for line in text.splitlines():
        chat = json.loads(line)["messages"]
        yield from (chat[:at] for at, message in enumerate(chat) if message["role"] == "assistant" and at)
        yield chat


class Sides:
    """One model as the gateway tokenizes it and as its engine does."""

    report: parity.ParityReport

    def __init__(self, http: httpx.AsyncClient, engine: str, identifier: Identifier, model: str) -> None:
        self._http = http
        self._engine = engine
        self._identifier = identifier
        self._model = model

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The engine's ids."""
        headers = {"content-type": "application/json"}
        response = await self._http.post(f"{self._engine}/tokenize", content=msgspec.json.encode(body), headers=headers)
        response.raise_for_status()
        ids: list[int] = response.json()["tokens"]
        return ids

    async def compare(self, messages: Messages) -> None:
        """Asserts that ids and keys of both sides are equal."""
        request = PromptRequest(
            model=self._model, namespace=Namespace(self._model), messages=msgspec.json.encode(messages)
        )
        theirs = await self.tokenize({"model": self._model, "messages": messages, "add_generation_prompt": True})
        identity = await self._identifier.identify(request)
        ours = await self._identifier.token_ids(request)
        assert ours == theirs
        assert (identity.mode, identity.tokens) == (IdentityMode.EXACT, len(theirs)), identity.fallback
        assert identity.keys == token_keys(request.namespace.root(SEED), theirs)

    async def compare_all(self, path: Path) -> int:
        """Compares every message list of a file; the number of them."""
        lists = list(message_lists(path))
        queue = iter(lists)

        async def worker() -> None:
            for messages in queue:
                await self.compare(messages)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return len(lists)


@contextlib.asynccontextmanager
async def sides(engine: str, agent: str) -> AsyncIterator[Sides]:
    """Learns the model from a running agent as the gateway does: its files, then parity on the probes."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        response = await http.get(f"{agent}/v1/model-files")
        files = msgspec.msgpack.decode(response.raise_for_status().content, type=ModelFiles)
        identifier = Identifier(SEED, deadline_s=60.0)
        await identifier.start()
        try:
            await identifier.load(files)
            made = Sides(http, engine, identifier, files.model)
            made.report = await parity.check(identifier, files.model, made.tokenize)
            assert made.report.ok, made.report
            yield made
        finally:
            await identifier.close()

"""Learns tokenizers and templates from the agents, and keeps proving that they give the engines' token ids."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import httpx
import msgspec

from gateway.errors import IdentityUnavailable
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.replica import Replica
from gateway.identity import parity
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import PromptRequest
from kvstore.messages import ModelFiles

log = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_S = 30.0
UNPROVEN = "not compared with an engine yet"
SAMPLES_KEPT = 8


class _Tokens(msgspec.Struct):
    tokens: list[int]


class ModelProfiles:
    """Owns which model files are loaded and the proof of parity with each engine: of the models whose files some
    replica brought last, and no others.

    A model is identified exactly only after an engine agreed on every probe, and while every engine that was asked
    agrees; a disagreement puts it back to text mode, which `/admin/replicas` shows, until the engine agrees again or
    other files are loaded. One sampled request decides nothing, since a client chose it: it has the probes run again,
    and only when half of the last samples differ are they believed against the probes.
    """

    def __init__(
        self, identifier: Identifier, engines: EngineHttp, sample_every: int, *, prove_again_s: float = 300.0
    ) -> None:
        self._identifier = identifier
        self._engines = engines
        self._sample_every = sample_every
        self._prove_again_s = prove_again_s
        self._brought: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._proven: set[tuple[str, str]] = set()
        self._disproven: dict[str, Replica] = {}
        self._recent: dict[str, deque[bool]] = {}
        self._learning: dict[str, asyncio.Lock] = {}
        self._prompts = 0
        self._sampling: asyncio.Task[None] | None = None
        self.samples = 0
        self.mismatches = 0

    async def learn(self, replica: Replica, files: ModelFiles) -> None:
        """Load the files if they are new, and prove parity with this replica's engine; one replica at a time."""
        before = self._brought.get(replica.id, files.model)
        self._brought[replica.id] = files.model
        if before not in self._brought.values():
            await self._forget(before)
        async with self._learning.setdefault(files.model, asyncio.Lock()):
            await self._learn(replica, files)

    async def _learn(self, replica: Replica, files: ModelFiles) -> None:
        model = files.model
        if self._digests.get(model) != files.digest:
            self._digests[model] = files.digest
            self._disproven.pop(model, None)
            self._proven = {pair for pair in self._proven if pair[1] != model}
            try:
                await self._identifier.load(files)
            except IdentityUnavailable as error:
                del self._digests[model]
                log.warning("model %s is identified by text: its files cannot be used: %s", model, error)
                return
            self._identifier.set_parity(model, False, UNPROVEN)
        if (replica.id, model) in self._proven:
            return
        await self._prove(replica, model)

    async def _forget(self, model: str) -> None:
        for table in (self._digests, self._disproven, self._recent, self._learning):
            table.pop(model, None)
        self._proven = {pair for pair in self._proven if pair[1] != model}
        await self._identifier.unload(model)

    async def _prove(self, replica: Replica, model: str) -> bool:
        report = await parity.check(self._identifier, model, lambda body: self._tokenize(replica, body))
        if not report.ok:
            self._disprove(replica, model, str(report))
            return False
        if self._disproven.get(model) is replica:
            log.info("model %s is identified exactly again", model)
            del self._disproven[model]
        self._proven.add((replica.id, model))
        if model not in self._disproven:
            self._identifier.set_parity(model, True, str(report))
        return True

    def sample(self, replica: Replica, prompt: PromptRequest) -> None:
        """Of every `sample_every` prompts (0: none), compare one with its engine's token ids, in the background."""
        self._prompts += 1
        if self._sample_every and self._prompts % self._sample_every == 0 and self._sampling is None:
            self._sampling = asyncio.create_task(self._compare(replica, prompt), name="parity sample")

    @property
    def idle(self) -> bool:
        """Whether no sampled request is being compared."""
        return self._sampling is None

    async def run(self) -> None:
        """Ask again, now and then, the engines that disagreed; until cancelled."""
        while True:
            await asyncio.sleep(self._prove_again_s)
            for model, replica in list(self._disproven.items()):
                try:
                    async with self._learning.setdefault(model, asyncio.Lock()):
                        if model in self._digests:
                            await self._prove(replica, model)
                except (httpx.HTTPError, msgspec.MsgspecError, RecursionError) as error:
                    log.debug("parity of %s on %s not asked again: %s", model, replica.id, error)

    async def close(self) -> None:
        """End a comparison that is under way."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def _compare(self, replica: Replica, prompt: PromptRequest) -> None:
        try:
            agrees = await parity.sample(self._identifier, prompt, lambda body: self._tokenize(replica, body))
            if agrees is not None:
                await self._weigh(replica, prompt.model, agrees)
        except (httpx.HTTPError, msgspec.MsgspecError, RecursionError) as error:
            log.debug("parity sample on %s skipped: %s", replica.id, error)
        finally:
            self._sampling = None

    async def _weigh(self, replica: Replica, model: str, agrees: bool) -> None:
        recent = self._recent.setdefault(model, deque(maxlen=SAMPLES_KEPT))
        recent.append(agrees)
        self.samples += 1
        if agrees:
            return
        self.mismatches += 1
        against = recent.count(False)
        log.warning(
            "a request for %s has other token ids on %s: %d of the last %d", model, replica.id, against, len(recent)
        )
        async with self._learning.setdefault(model, asyncio.Lock()):
            proven = await self._prove(replica, model)
        if proven and 2 * against >= SAMPLES_KEPT:
            recent.clear()
            self._disprove(replica, model, f"{against} of the last {SAMPLES_KEPT} sampled requests differ")

    async def _tokenize(self, replica: Replica, body: dict[str, Any]) -> list[int]:
        response = await self._engines.post(
            replica, "/tokenize", msgspec.json.encode(body), timeout_s=TOKENIZE_TIMEOUT_S
        )
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Tokens).tokens

    def _disprove(self, replica: Replica, model: str, why: str) -> None:
        log.warning("model %s is identified by text: token ids differ from those of %s: %s", model, replica.id, why)
        self._disproven[model] = replica
        self._proven.discard((replica.id, model))
        self._identifier.set_parity(model, False, f"{replica.id}: {why}")

"""Learns tokenizers and templates from the agents, and keeps proving that they give the engines' token ids."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from gateway.errors import IdentityUnavailable
from gateway.fleet.engine_http import EngineHttp
from gateway.fleet.replica import Replica
from gateway.identity import parity
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import PromptRequest
from gateway.identity.status import PromptKind
from kvstore.messages import ModelFiles

log = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_S = 30.0
UNPROVEN = "not compared with an engine yet"
SAMPLES_KEPT = 8

TICK_S = 5.0
"""How soon `run` asks what could not be asked, and notices which engines are gone or back."""
LOAD_ROUNDS = 12
"""Files that can never be loaded are tried every so many `prove_again_s` in the end: once an hour."""

UNASKED = (httpx.HTTPError, msgspec.MsgspecError, RecursionError)
"""What an engine that gives no token ids raises."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Proof:
    """What one engine said of a model.

    `why` is how its token ids differ, "" when they do not but for the kinds of requests in `off`, None while that is
    not known; it is to be asked again from `again` on. `tries` counts what came to nothing in a row.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.off: frozenset[PromptKind] = frozenset()
        self.again = 0.0
        self.tries = 0

    @property
    def clean(self) -> bool:
        """Whether there is nothing to ask again."""
        return self.why == "" and not self.off


class _Profile:
    """A model's files and its proofs. `lock` is held while they are loaded or an engine is asked."""

    def __init__(self, files: ModelFiles) -> None:
        self.lock = asyncio.Lock()
        self.take(files)

    def take(self, files: ModelFiles) -> None:
        """Other files: nothing is known of them."""
        self.files = files
        self.proofs: dict[Replica, _Proof] = {}
        self.recent: deque[bool] = deque(maxlen=SAMPLES_KEPT)
        self.load_from = 0.0
        self.failures = 0


class ModelProfiles:
    """Owns which model files are loaded and the proof of parity with each engine: of the models whose files some
    replica brought last, and no others.

    A model is identified exactly only after an engine agreed on every probe, and while every engine that was asked
    agrees; a disagreement puts it back to text mode, which `/admin/replicas` shows, until the engine agrees again or
    other files are loaded. It does not count while the engine is down or serves other models: on its return it is asked
    as if for the first time. One sampled request decides nothing, since a client chose it: it has the probes run again,
    and only when half of the last samples differ are they believed against the probes.

    Nothing that went wrong is for good. `run` asks again what could not be asked, soon and then ever more seldom, every
    `prove_again_s` seconds engines that disagreed on anything, and has files loaded again that could not be, or of
    which a worker died since.
    """

    def __init__(
        self,
        identifier: Identifier,
        engines: EngineHttp,
        sample_every: int,
        *,
        prove_again_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identifier = identifier
        self._engines = engines
        self._sample_every = sample_every
        self._prove_again_s = prove_again_s
        self._clock = clock
        self._tick_s = min(TICK_S, prove_again_s)
        self._brought: dict[Replica, str] = {}
        self._profiles: dict[str, _Profile] = {}
        self._prompts = 0
        self._sampling: asyncio.Task[None] | None = None
        self.samples = 0
        self.mismatches = 0

    async def learn(self, replica: Replica, files: ModelFiles) -> None:
        """Load the files if they are new, and prove parity with this replica's engine; one replica at a time.

        Raises what the engine's HTTP raises.
        """
        before, self._brought[replica] = self._brought.get(replica), files.model
        profile = self._profiles.setdefault(files.model, _Profile(files))
        if before not in (None, files.model):
            await self._leave(replica, self._profiles[before])
        async with profile.lock:
            if profile.files.digest != files.digest:
                profile.take(files)
            proof = profile.proofs.setdefault(replica, _Proof())
            if not await self._load(profile) or proof.why == "":
                return
            try:
                await self._prove(replica, profile, proof)
            except IdentityUnavailable as error:
                log.info("parity of %s on %s not proven yet: %s", files.model, replica.id, error)

    async def _leave(self, replica: Replica, profile: _Profile) -> None:
        """The replica brings another model now; one that nobody brings is forgotten."""
        model = profile.files.model
        profile.proofs.pop(replica, None)
        self._judge(profile)
        async with profile.lock:
            if model not in self._brought.values() and self._profiles.pop(model, None) is not None:
                await self._identifier.unload(model)

    async def _load(self, profile: _Profile) -> bool:
        """Whether the files are loaded, after trying to, if it is time."""
        if self._clock() < profile.load_from:
            return False
        model = profile.files.model
        try:
            await self._identifier.load(profile.files)
        except IdentityUnavailable as error:
            # A load can cost the worker its life, and with it all models some seconds.
            wait = self._wait(profile.failures, LOAD_ROUNDS * self._prove_again_s)
            profile.load_from = self._clock() + wait
            profile.failures += 1
            log.warning("model %s is identified by text: not loaded, next try in %.0f s: %s", model, wait, error)
            return False
        profile.failures = 0
        self._judge(profile)
        return True

    async def _prove(self, replica: Replica, profile: _Profile, proof: _Proof) -> bool:
        """Whether the engine agrees on chats. Raises IdentityUnavailable and what the engine's HTTP raises."""
        model = profile.files.model
        proof.again = self._clock() + self._wait(proof.tries, self._prove_again_s)
        proof.tries += 1
        report = await parity.check(self._identifier, model, lambda body: self._tokenize(replica, body))
        if not report.ok:
            self._disprove(replica, profile, proof, str(report))
            return False
        if proof.why:
            log.info("model %s has the token ids of %s again", model, replica.id)
        self._settle(profile, proof, "", report.off)
        return True

    def _disprove(self, replica: Replica, profile: _Profile, proof: _Proof, why: str) -> None:
        model = profile.files.model
        log.warning("model %s is identified by text: token ids differ from those of %s: %s", model, replica.id, why)
        self._settle(profile, proof, why, frozenset())

    def _settle(self, profile: _Profile, proof: _Proof, why: str, off: frozenset[PromptKind]) -> None:
        proof.why, proof.off, proof.tries = why, off, 0
        proof.again = math.inf if proof.clean else self._clock() + self._prove_again_s
        self._judge(profile)

    def _judge(self, profile: _Profile) -> None:
        """Tell the identifier what all engines said."""
        model = profile.files.model
        against = [f"{replica.id}: {proof.why}" for replica, proof in profile.proofs.items() if proof.why]
        agreeing = [proof for proof in profile.proofs.values() if proof.why == ""]
        why = against[0] if against else "" if agreeing else UNPROVEN
        self._identifier.set_parity(model, not why, why)
        self._identifier.restrict(model, {kind for proof in agreeing for kind in proof.off})
        if not agreeing:
            self._identifier.set_dialect(model, None)  # whoever agreed in it is gone, or speaks another

    def _wait(self, tries: int, longest: float) -> float:
        return min(self._tick_s * 2.0 ** min(tries, 16), longest)

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
        """Make good, now and then, what went wrong; until cancelled."""
        while True:
            await asyncio.sleep(self._tick_s)
            for model, profile in list(self._profiles.items()):
                async with profile.lock:
                    if self._profiles.get(model) is profile:
                        await self._make_good(profile)

    async def _make_good(self, profile: _Profile) -> None:
        model = profile.files.model
        for replica, proof in list(profile.proofs.items()):
            if not proof.clean and not _serves(replica, model):
                profile.proofs[replica] = _Proof()
        if not await self._load(profile):
            return
        for replica, proof in list(profile.proofs.items()):
            if proof.again <= self._clock() and _serves(replica, model):
                try:
                    await self._prove(replica, profile, proof)
                except (IdentityUnavailable, *UNASKED) as error:
                    log.debug("parity of %s on %s not proven: %s", model, replica.id, error)

    async def close(self) -> None:
        """End a comparison that is under way."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)

    async def _compare(self, replica: Replica, prompt: PromptRequest) -> None:
        try:
            agrees = await parity.sample(self._identifier, prompt, lambda body: self._tokenize(replica, body))
            profile = self._profiles.get(prompt.namespace.model) or self._profiles.get(prompt.model)
            if agrees is not None and profile is not None:
                await self._weigh(replica, profile, agrees)
        except (IdentityUnavailable, *UNASKED) as error:
            log.debug("parity sample on %s skipped: %s", replica.id, error)
        finally:
            self._sampling = None

    async def _weigh(self, replica: Replica, profile: _Profile, agrees: bool) -> None:
        recent, model = profile.recent, profile.files.model
        recent.append(agrees)
        self.samples += 1
        if agrees:
            return
        self.mismatches += 1
        against = recent.count(False)
        log.warning(
            "a request for %s has other token ids on %s: %d of the last %d", model, replica.id, against, len(recent)
        )
        async with profile.lock:
            proof = profile.proofs.setdefault(replica, _Proof())
            if await self._prove(replica, profile, proof) and 2 * against >= SAMPLES_KEPT:
                recent.clear()
                why = f"{against} of the last {SAMPLES_KEPT} sampled requests differ"
                self._disprove(replica, profile, proof, why)

    async def _tokenize(self, replica: Replica, body: dict[str, Any]) -> list[int]:
        response = await self._engines.post(
            replica, "/tokenize", msgspec.json.encode(body), timeout_s=TOKENIZE_TIMEOUT_S
        )
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Tokens).tokens


def _serves(replica: Replica, model: str) -> bool:
    return replica.engine_up and model in replica.models

"""What the demo plays: the same questions scattered and routed, a hot document, and what it all cost."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from gateway.demo.client import Answer, DemoClient, DemoError, Fetched
from gateway.demo.questions import DOCUMENTS, Document
from gateway.demo.recount import Recount, recount
from gateway.demo.screen import Screen

BURST = 10
"""Questions about one document at once."""

COMPARED = "Name the topic of the document."
"""Asked of two replicas after the burst. No document's own question begins like it, so that both have the same blocks
of the prompt and compute the same tokens in the same steps: with equal KV the words are equal, in any precision."""

BURSTS = 3
"""Documents to try, where the host has other work on all its cores and a fetch comes too late for its engine."""

FEW = 10
"""A question whose document is there computes at most this fraction (1/10) of its prompt."""

QUIET_S = 10.0


@dataclass(frozen=True)
class Phase:
    """One way of playing the questions: the answers, and what the caches held afterwards."""

    name: str
    openings: Sequence[Answer]
    followups: Sequence[Answer]
    recount: Recount

    @property
    def uncached_followups(self) -> int:
        """Prompt tokens of the follow-ups that engines had to compute."""
        return sum(answer.uncached for answer in self.followups)

    @property
    def ttft_s(self) -> float:
        """Median time to the first token of the follow-ups."""
        return statistics.median(answer.ttft_s for answer in self.followups)


@dataclass(frozen=True)
class Spill:
    """The burst on one document: its home, who answered, and where the question after it went.

    `compared` are answers to one more question, first by home, which computed the document, then by the next, which
    fetched it; nothing else was running.
    """

    document: str
    home: str
    next: str
    burst: Sequence[Answer]
    after: Answer
    compared: tuple[Answer, Answer]

    @property
    def spilled(self) -> list[Answer]:
        """The burst's answers that did not come from the home."""
        return [answer for answer in self.burst if answer.replica != self.home]

    @property
    def fetches(self) -> list[Fetched]:
        """What the spilled ones read from home; those that came while it was under way waited for it."""
        return [each.fetched for each in self.spilled if each.fetched is not None and each.fetched.moved]

    @property
    def in_time(self) -> bool:
        """Whether some spilled, and none of those computed the document, because its KV was read from home in time."""
        return bool(self.fetches) and all(answer.uncached * FEW <= answer.prompt_tokens for answer in self.spilled)

    @property
    def fetch_totals(self) -> tuple[int, float, float]:
        """Over all of them: tokens moved, seconds that took, and seconds expected for computing the same instead."""
        fetches = self.fetches
        return (
            sum(each.moved for each in fetches),
            sum(each.seconds for each in fetches),
            sum(each.recompute_s for each in fetches),
        )


@dataclass
class Scenario:
    """Plays the phases against a running deployment.

    `followups` questions are asked about each document; the answers of the burst have `burst_tokens`, enough for all of
    them to overlap.
    """

    client: DemoClient
    engines: Sequence[str]
    http: httpx.AsyncClient
    screen: Screen
    followups: int
    seed: int
    burst_tokens: int
    replicas: Sequence[str]

    async def scattered(self) -> Phase:
        """Round-robin over a shuffled order. A cyclic order would always send a document to the same replica, and give
        round-robin an affinity that it does not have."""
        turns = itertools.cycle(self.replicas)
        return await self._phase("scattered", lambda: next(turns))

    async def routed(self) -> Phase:
        """The gateway's own choice."""
        return await self._phase("routed", lambda: None)

    async def _phase(self, name: str, pin: Callable[[], str | None]) -> Phase:
        await self._empty_caches()
        rng = random.Random(self.seed)
        openings = [(document, document.questions[0]) for document in DOCUMENTS]
        followups = [(d, q) for d in DOCUMENTS for q in d.questions[1 : 1 + self.followups]]
        rng.shuffle(openings)
        rng.shuffle(followups)
        answers = [await self._ask(document, question, pin()) for document, question in openings + followups]
        counted = await recount(self.http, self.engines, self._ledger_bytes)
        return Phase(name, answers[: len(openings)], answers[len(openings) :], counted)

    async def _ask(self, document: Document, question: str, pin: str | None) -> Answer:
        answer = await self.client.ask(document, question, pin=pin)
        self.screen.answer(answer)
        return answer

    async def hot(self) -> Spill:
        """`spill`, and again with another document while what was to be fetched came too late."""
        for document in DOCUMENTS[: BURSTS - 1]:
            spill = await self.spill(document)
            if spill.in_time:
                return spill
            self.screen.line("  not all of it was read in time: this host is busy. Once more, with another document")
        return await self.spill(DOCUMENTS[BURSTS - 1])

    async def spill(self, document: Document) -> Spill:
        """Ask about one document many times at once: its home takes what its bound allows, the ring's next the rest."""
        before = (await self.client.explain(document, document.questions[0]))["placement"]
        ring, home = before["ring"], before["home"]
        following = ring[(ring.index(home) + 1) % len(ring)]
        asked = [document.questions[at % len(document.questions)] for at in range(BURST)]
        burst = await asyncio.gather(
            *(self.client.ask(document, question, max_tokens=self.burst_tokens) for question in asked)
        )
        for answer in burst:
            self.screen.answer(answer)
        after = await self._ask(document, document.questions[1], None)
        compared = (await self._ask(document, COMPARED, home), await self._ask(document, COMPARED, following))
        return Spill(document.name, home, following, burst, after, compared)

    async def _empty_caches(self) -> None:
        for engine in self.engines:
            (await self.http.post(f"{engine}/reset_prefix_cache")).raise_for_status()
        for _ in range(int(QUIET_S / 0.05)):
            found = await self.client.get("/admin/replicas")
            if not any(replica["held_blocks"] or replica["pool_blocks"] for replica in found["replicas"]):
                return
            await asyncio.sleep(0.05)
        raise DemoError("the caches were reset, but the gateway still counts blocks as held")

    async def _ledger_bytes(self) -> int:
        """Of the engines' own memory: what the agents' pools hold besides is a tier of its own."""
        report = await self.client.get("/admin/duplication?top=0")
        return sum(int(model["excess_bytes"]) for model in report["models"] if model["tier"] == "hbm")

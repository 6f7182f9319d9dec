"""Clients that never stop asking, one of each gateway, and what they were answered."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from net_fleet import COUNT, NetFleet, prompt

from gateway.demo.questions import DOCUMENTS

QUESTIONS = 3
PAUSE_S = 0.15
ANSWER_S = 30.0


@dataclass
class Answers:
    """What came of one client's requests. `excused` failed while their gateway was cut off or not ready; `wrong` has
    those whose words were not the expected ones, or that an engine had less of in its cache than was promised."""

    right: int = 0
    excused: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Traffic:
    """Asks through every gateway, one request after the other each, as long as it is entered.

    Owns the clients. `answers` are of requests since the last `fresh`. One that begins or ends while its gateway is
    `excused` may fail.
    """

    def __init__(self, fleet: NetFleet, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._expected: dict[tuple[int, int], str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._going = asyncio.Event()
        self._busy = 0
        self.excused: set[int] = set()
        self.answers = [Answers() for _ in range(COUNT)]

    async def __aenter__(self) -> Traffic:
        for document in range(len(DOCUMENTS)):
            for question in range(QUESTIONS):
                url = f"{self._fleet.url('engine-0')}/v1/chat/completions"
                response = await self._fleet.http.post(url, json=prompt(document, question), timeout=60)
                self._expected[document, question] = _words(response.json())
        self._going.set()
        self._tasks = [asyncio.create_task(self._ask_on(at)) for at in range(COUNT)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fresh(self) -> list[Answers]:
        """Begins a new count; returns the last."""
        before, self.answers = self.answers, [Answers() for _ in range(COUNT)]
        return before

    async def pause(self) -> None:
        """Nothing more is asked; returns when all has been answered."""
        self._going.clear()
        while self._busy:
            await asyncio.sleep(0.02)

    def resume(self) -> None:
        """Goes on."""
        self._going.set()

    async def some(self, each: int, *gateways: int) -> None:
        """Until these gateways have given so many more right answers."""
        counted, goal = self.answers, {at: self.answers[at].right + each for at in gateways or range(COUNT)}
        deadline = time.monotonic() + ANSWER_S + 2 * each
        while any(counted[at].right < count for at, count in goal.items()):
            assert time.monotonic() < deadline, f"no answers: {self.answers}"
            await asyncio.sleep(0.05)

    def check(self) -> None:
        """Asserts that every answer was right, and none was missing but of those that are excused."""
        for at, answers in enumerate(self.answers):
            assert not answers.wrong and not answers.failed, (at, answers)

    async def _ask_on(self, gateway: int) -> None:
        while True:
            await self._going.wait()
            self._busy += 1
            try:
                await self._ask(gateway)
            finally:
                self._busy -= 1
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, gateway: int) -> None:
        answers, excused = self.answers[gateway], gateway in self.excused
        asked = self._rng.randrange(len(DOCUMENTS)), self._rng.randrange(QUESTIONS)
        begin = time.monotonic()
        url = f"{self._fleet.url(f'gateway-{gateway}')}/v1/chat/completions"
        try:
            response = await self._fleet.http.post(url, json=prompt(*asked), timeout=httpx.Timeout(ANSWER_S, connect=2))
            failure = "" if response.status_code == 200 else f"{response.status_code}: {response.text}"
        except httpx.HTTPError as error:
            failure = repr(error)
        if failure:
            if excused or gateway in self.excused:
                answers.excused += 1
            else:
                answers.failed.append(failure)
            return
        answers.slowest_s = max(answers.slowest_s, time.monotonic() - begin)
        wrong = await self._wrong(gateway, response, self._expected[asked])
        if wrong:
            answers.wrong.append(wrong)
        else:
            answers.right += 1

    async def _wrong(self, gateway: int, response: httpx.Response, expected: str) -> str:
        if (words := _words(response.json())) != expected:
            return f"answered {words!r}, expected {expected!r}"
        promised = int(response.headers["x-gateway-predicted-cached-tokens"])
        cached = int(response.headers["x-gateway-cached-tokens"])
        if promised <= cached:
            return ""
        receipt = await self._fleet.get(
            f"{self._fleet.admin_url(gateway)}/admin/receipts/{response.headers['x-request-id']}"
        )
        if receipt and receipt["fetch"]:
            return ""  # it was to be fetched, and that may fail
        return f"promised {promised} cached tokens, the engine had {cached}: {receipt}"


def _words(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text

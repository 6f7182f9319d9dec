"""The demo's burst is played again where the host was too busy for a fetch, and not more often than that."""

from __future__ import annotations

import httpx
import pytest

from gateway.demo.client import Answer, DemoClient, Fetched
from gateway.demo.questions import DOCUMENTS, Document
from gateway.demo.scenario import BURSTS, Scenario, Spill
from gateway.demo.screen import Screen
from gateway.demo.verdicts import judge_spill

PROMPT = 2_000


def answer(replica: str, cached: int, *, moved: int = 0, text: str = "words") -> Answer:
    fetched = Fetched("fetched", "home", moved, moved, 0.02, 0.2) if moved else None
    return Answer("d", replica, "", "home", ("home", "next"), cached, cached, PROMPT, 0.1, text, fetched)


def spill(*spilled: Answer, text: str = "words") -> Spill:
    compared = answer("home", 1_900), answer("next", 1_900, text=text)
    return Spill("d", "home", "next", [answer("home", 1_900), *spilled], answer("home", 1_900), compared)


GOOD = spill(answer("next", 1_900, moved=1_900), answer("next", 1_900))
LATE = spill(answer("next", 16), answer("next", 1_900, moved=1_900))


class Played(Scenario):
    """Plays these, one after the other."""

    def script(self, *spills: Spill) -> Played:
        self.spills = iter(spills)
        self.documents: list[str] = []
        return self

    async def spill(self, document: Document) -> Spill:
        self.documents.append(document.name)
        return next(self.spills)


@pytest.fixture
def played() -> Played:
    return Played(DemoClient("http://x", "http://x", "m"), [], httpx.AsyncClient(), Screen(), 1, 0, 1, [])


@pytest.mark.parametrize("late", range(BURSTS))
async def test_a_late_one_is_played_again_with_another_document(played: Played, late: int) -> None:
    assert await played.script(*[LATE] * late, GOOD).hot() is GOOD
    assert played.documents == [document.name for document in DOCUMENTS[: late + 1]]


async def test_after_the_last_one_it_is_what_it_is(played: Played) -> None:
    assert await played.script(*[LATE] * BURSTS).hot() is LATE
    assert not all(verdict.ok for verdict in judge_spill(LATE, pools=True))


@pytest.mark.parametrize(
    ("found", "in_time"),
    [
        (GOOD, True),
        (LATE, False),
        (spill(), False),
        (spill(answer("next", 1_900)), False),
        (spill(answer("next", 1_799, moved=1_799)), False),
    ],
)
def test_in_time_is_when_nobody_computed_the_document(found: Spill, in_time: bool) -> None:
    assert found.in_time is in_time


async def test_other_words_are_no_matter_of_time(played: Played) -> None:
    wrong = spill(*GOOD.spilled, text="others")
    assert await played.script(wrong, GOOD).hot() is wrong
    assert [verdict.ok for verdict in judge_spill(wrong, pools=True)] == [True, True, False, True]

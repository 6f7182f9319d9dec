"""Fetch records against a naive twin: what is kept, what a receipt finds, and what the totals add up to."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from fetch_support import record

from gateway.fleet.fetches import Fetches, FetchTotals, regret_s
from kvstore.messages import FetchOutcome, FetchRecord

NAMES = ["replica-0", "replica-1"]


@pytest.mark.parametrize(
    ("fields", "regret"),
    [
        ({}, 0.0),
        ({"total_s": 0.5}, 0.12),
        ({"outcome": FetchOutcome.LOCAL, "total_s": 0.39}, 0.01),
        ({"outcome": FetchOutcome.LATE, "total_s": 0.3}, 0.3),
        ({"outcome": FetchOutcome.FAILED, "total_s": 0.01}, 0.01),
        ({"outcome": FetchOutcome.MISSED, "total_s": 0.02}, 0.02),
        ({"outcome": FetchOutcome.REFUSED, "total_s": 0.02}, 0.02),
        ({"outcome": FetchOutcome.PARTIAL}, None),
        ({"outcome": FetchOutcome.DECLINED}, None),
        ({"outcome": FetchOutcome.SHADOW}, None),
        ({"outcome": FetchOutcome.CANCELLED}, None),
    ],
)
def test_regret_is_what_computing_would_have_saved(fields, regret):
    found = regret_s(record(**fields))
    assert found == (None if regret is None else pytest.approx(regret))


def test_totals_say_how_good_the_predictions_are():
    totals = FetchTotals()
    assert totals.predicted_over_measured is None
    totals.add(record(total_s=0.08))
    totals.add(record(total_s=0.08, predicted_fetch_s=0.2))
    totals.add(record(outcome=FetchOutcome.LATE, moved=3, predicted_fetch_s=9.0, total_s=1.0))
    assert (totals.count, totals.bytes, totals.regrets) == (3, 2300, 3)
    assert totals.predicted_over_measured == pytest.approx(0.24 / 0.16)
    assert totals.regret_s == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_a_list_of_everything(seed):
    rng = random.Random(seed)
    told: list[FetchRecord] = []
    fetches, everything = Fetches(NAMES, told.append, limit=20), []
    for step in range(400):
        made = record(
            request=f"engine-{step}",
            gateway_request=rng.choice(["", *(f"id-{i}" for i in range(30))]),
            replica=rng.choice(NAMES),
            source=rng.choice([*NAMES, "", f"made-up-{step}"]),
            outcome=rng.choice(list(FetchOutcome)),
            moved=rng.randrange(10),
        )
        fetches.add(made)
        everything.append(made)
        fetches.check()
        kept = everything[-20:]
        assert list(fetches.newest()) == kept[::-1]
        for request in (f"id-{i}" for i in range(30)):
            mine = [each for each in kept if each.gateway_request == request]
            assert fetches.of(request) is (mine[-1] if mine else None)
    assert told == everything
    assert fetches.of("") is None
    for found, key_of in ((fetches.by_outcome, _outcome), (fetches.by_link, _link)):
        expected: dict[Any, FetchTotals] = {}
        for each in everything:
            if (key := key_of(each)) is not None:
                expected.setdefault(key, FetchTotals()).add(each)
        assert found == expected
    assert len(fetches.by_link) == 4, "links of replicas that nobody knows are not kept"


def _outcome(each: FetchRecord) -> Any:
    return each.outcome


def _link(each: FetchRecord) -> Any:
    return (each.source, each.replica) if each.source in NAMES else None


def test_the_last_record_of_a_request_is_its_own():
    fetches = Fetches(NAMES, limit=2)
    first, second = record(request="a"), record(request="b", outcome=FetchOutcome.LATE)
    fetches.add(first)
    fetches.add(second)
    assert fetches.of("id-1") is second
    fetches.add(msgspec.structs.replace(first, gateway_request="id-2"))
    assert fetches.of("id-1") is second, "that an older one of the same request was dropped changes nothing"
    fetches.add(msgspec.structs.replace(first, gateway_request="id-3"))
    assert fetches.of("id-1") is None

"""The log of searches against a plain list of them."""

from __future__ import annotations

import random
from collections import Counter

from kvstore.messages import FetchOutcome, FetchRecord
from replica_agent.kv.decision import Prediction
from replica_agent.kv.records import BUCKETS_S, KEPT, Account, FetchLog, Steps


def test_what_is_kept_and_what_is_summed_are_those_of_a_list() -> None:
    rng = random.Random(5)
    told: list[FetchRecord] = []
    now = [100.0]
    subject = FetchLog("me", told.append, clock=lambda: now[0], wall_clock=lambda: 7.0)
    transfers: list[float] = []
    for number in range(KEPT + 200):
        now[0] += rng.random()
        account = Account(f"r{number}", f"g{number}", "a", 16, 1_000, now[0] - 0.5, predicted=Prediction(1.0, 2.0, 3.0))
        outcome = rng.choice([*FetchOutcome])
        record = subject.add(account, Steps(0.1, 0.2, 0.3, 0.4), outcome, "why", loaded=number % 7, copy_s=0.25)
        assert record is told[-1]
        if rng.random() < 0.5:
            transfers.append(rng.choice([0.001, 0.002, 0.3, 100.0]))
            subject.moved(1_000, transfers[-1])
        subject.check()
    assert subject.outcomes == Counter(dict.fromkeys(FetchOutcome, 0)) + Counter(record.outcome for record in told)
    page = subject.page()
    assert [record["request"] for record in page["fetches"]] == [record.request for record in told[: -KEPT - 1 : -1]]
    assert page["totals"] == {
        "records": len(told),
        "outcomes": {outcome.value: sum(record.outcome is outcome for record in told) for outcome in FetchOutcome},
        "transfers": len(transfers),
        "bytes_moved": 1_000 * len(transfers),
        "transfer_seconds": sum(transfers),
        "blocks_loaded": sum(record.loaded for record in told),
    }
    counts = dict(subject.buckets)
    for bound in BUCKETS_S:
        assert counts[str(bound)] == sum(seconds <= bound for seconds in transfers)
    assert counts["+Inf"] == len(transfers)


def test_a_record_says_everything() -> None:
    told: list[FetchRecord] = []
    subject = FetchLog("me", told.append, clock=lambda: 10.0, wall_clock=lambda: 7.0)
    account = Account("r", "g", "a", 16, 1_000, 9.0, "shm", 8, 1, 6, 2, Prediction(1.0, 2.0, 3.0), 0.5)
    assert subject.add(account, Steps(0.1, 0.2, 0.3, 0.4), FetchOutcome.PARTIAL, "why", 5, 0.25) == FetchRecord(
        request="r",
        gateway_request="g",
        at=7.0,
        replica="me",
        source="a",
        transport="shm",
        outcome=FetchOutcome.PARTIAL,
        reason="why",
        block_tokens=16,
        block_bytes=1_000,
        asked=8,
        own=1,
        moved=6,
        loaded=5,
        failed=2,
        predicted_fetch_s=1.0,
        predicted_rest_s=2.0,
        predicted_recompute_s=3.0,
        decide_s=0.5,
        lease_s=0.1,
        move_s=0.2,
        verify_s=0.3,
        confirm_s=0.4,
        copy_s=0.25,
        total_s=1.0,
    )

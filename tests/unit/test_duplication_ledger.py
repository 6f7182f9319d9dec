"""Ledger, prefixes, history and report on small cases; `tests/behaviours/test_duplication.py` has the recount."""

from __future__ import annotations

import msgspec
import pytest

from gateway.duplication.history import History
from gateway.duplication.ledger import Ledger, Totals
from gateway.duplication.report import DuplicationReport, Reporter, render_text
from gateway.placement.index import PrefixIndex
from kvstore.messages import ROOT_PARENT, Tier

MIB = 1 << 20


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    for name in "abc":
        index.add_replica(name)
    return index


@pytest.fixture
def ledger(index: PrefixIndex) -> Ledger:
    ledger = Ledger(index)
    for name in "abc":
        ledger.register(name, "m", 2 * MIB, 16)
    return ledger


def _chain(index: PrefixIndex, replica: str, *keys: int, tier: Tier = Tier.HBM, after: int = ROOT_PARENT) -> None:
    index.store(replica, tier, keys, [after, *keys[:-1]])


def test_one_holder_costs_nothing_extra(index, ledger):
    _chain(index, "a", 1, 2, 3)
    assert ledger.excess == 0
    assert ledger.totals() == {("m", Tier.HBM): Totals(held=6 * MIB, distinct=6 * MIB)}
    assert ledger.pairs() == {}
    assert ledger.prefixes() == []
    assert ledger.replica_bytes() == {("a", Tier.HBM): 6 * MIB}


def test_every_further_holder_costs_its_bytes(index, ledger):
    for name in "abc":
        _chain(index, name, 1, 2)
    assert ledger.excess == 2 * 2 * 2 * MIB
    assert ledger.pairs() == {(Tier.HBM, x, y): 4 * MIB for x, y in ("ab", "ac", "bc")}
    index.clear("b")
    assert ledger.excess == 4 * MIB
    assert ledger.pairs() == {(Tier.HBM, "a", "c"): 4 * MIB}
    index.remove_replica("c")
    assert ledger.excess == 0
    ledger.check()


def test_a_replica_counts_from_its_registration(index):
    ledger = Ledger(index)
    ledger.register("a", "m", 10, 16)
    for name in "ab":
        _chain(index, name, 1, 2)
    assert ledger.excess == 0
    ledger.register("b", "m", 10, 16)
    assert ledger.excess == 20
    ledger.register("b", "m", 30, 16)
    assert ledger.excess == 0, "another layout: its blocks cannot stand in for the other's"
    ledger.check()
    ledger.register("b", "m", 10, 16)
    ledger.forget("a")
    assert ledger.excess == 0
    assert ledger.totals()["m", Tier.HBM].held == 20
    ledger.check()


def test_tiers_and_models_are_counted_apart(index, ledger):
    ledger.register("c", "other", 2 * MIB, 16)
    _chain(index, "a", 1)
    _chain(index, "b", 1, tier=Tier.DRAM)
    _chain(index, "c", 1)
    assert ledger.excess == 0
    _chain(index, "a", 1, tier=Tier.DRAM)
    assert ledger.totals()["m", Tier.DRAM].excess == 2 * MIB
    assert ledger.totals()["m", Tier.HBM].excess == 0
    assert ledger.pairs() == {(Tier.DRAM, "a", "b"): 2 * MIB}


def test_prefixes_end_where_holders_change_or_chains_part(index, ledger):
    for name in "abc":
        _chain(index, name, 1, 2)
    for name in "ab":
        _chain(index, name, 3, 4, after=2)
        _chain(index, name, 5, after=4)
        _chain(index, name, 6, after=4)
    _chain(index, "a", 7, after=6)
    found = {p.key: (p.depth_tokens, p.tokens, p.copies, p.holders, p.excess_bytes) for p in ledger.prefixes()}
    assert found == {
        2: (32, 32, 3, ["a", "b", "c"], 8 * MIB),
        4: (64, 32, 2, ["a", "b"], 4 * MIB),
        5: (80, 16, 2, ["a", "b"], 2 * MIB),
        6: (80, 16, 2, ["a", "b"], 2 * MIB),
    }
    assert sum(p.excess_bytes for p in ledger.prefixes()) == ledger.excess
    assert [p.key for p in ledger.prefixes(2)] == [2, 4]


def test_prefixes_of_longer_blocks_count_their_own_tokens(index):
    ledger = Ledger(index)
    ledger.register("a", "m", 100, 16)
    for name in "bc":
        ledger.register(name, "m", 400, 64)
    _chain(index, "a", 1, 2, 3, 4, 5, 6, 7, 8)
    for name in "bc":
        _chain(index, name, 4, 8)
    (prefix,) = ledger.prefixes()
    assert (prefix.key, prefix.depth_tokens, prefix.tokens, prefix.excess_bytes) == (8, 128, 128, 800)


def test_history_keeps_peaks_between_samples_and_weighs_by_time(index, ledger):
    clock = Clock()
    history = History(ledger, samples=4, clock=clock)
    history.sample()
    _chain(index, "a", 1)
    _chain(index, "b", 1)
    index.remove("b", Tier.HBM, [1])
    clock.now = 10.0
    assert (history.sample().excess_bytes, history.samples()[-1].peak_bytes) == (0, 2 * MIB)
    _chain(index, "b", 1)
    clock.now = 20.0
    history.sample()
    clock.now = 40.0
    window = history.window(40.0)
    assert window.mean_bytes == pytest.approx(20 * 2 * MIB / 40)
    assert window.max_bytes == 2 * MIB
    index.clear("b")
    history.sample()
    clock.now = 50.0
    history.sample()
    assert history.window(5.0).max_bytes == 0
    assert history.window(5.0).mean_bytes == 0
    clock.now = 60.0
    history.sample()
    assert len(history.samples()) == 4


def test_a_history_without_samples_tells_the_present(index, ledger):
    _chain(index, "a", 1)
    _chain(index, "b", 1)
    window = History(ledger).window(60.0)
    assert (window.mean_bytes, window.max_bytes) == (2 * MIB, 2 * MIB)


def test_the_report_is_bytes_in_json_and_mib_in_text(index, ledger):
    for name in "abc":
        _chain(index, name, 1, 2)
    report = Reporter(ledger, history=History(ledger)).report(2)
    assert (report.held_bytes, report.distinct_bytes, report.excess_bytes) == (12 * MIB, 4 * MIB, 8 * MIB)
    assert len(report.pairs) == 2
    assert msgspec.json.decode(msgspec.json.encode(report), type=DuplicationReport) == report
    text = render_text(report)
    assert "duplicated  8.0 MiB  (66.7% of held)" in text
    assert "0000000000000002" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_an_empty_report_is_a_report(ledger):
    assert render_text(Reporter(ledger).report()).startswith("KV held     0.0 MiB")


def test_what_the_index_evicts_is_counted_no_more():
    index = PrefixIndex(16 << 20)
    ledger = Ledger(index)
    for name in "ab":
        index.add_replica(name)
        ledger.register(name, "m", 1, 16)
    for begin in range(1, 600_000, 8_000):
        for name in "ab":
            index.store(name, Tier.HBM, range(begin, begin + 8_000), [ROOT_PARENT, *range(begin, begin + 7_999)])
    assert index.evicted_blocks > 200_000
    assert ledger.excess == len(index) == ledger.totals()["m", Tier.HBM].distinct
    assert ledger.pairs() == {(Tier.HBM, "a", "b"): len(index)}
    assert index.evicted_of("a") == index.evicted_blocks == index.reported_blocks("a", Tier.HBM) - len(index)


def test_parents_that_lead_round_in_a_circle_end_the_walk(index, ledger):
    for name in "ab":
        index.store(name, Tier.HBM, [11, 12, 13, 21], [12, 13, 11, 21])
        index.store(name, Tier.HBM, [14], [12])
    assert sum(prefix.excess_bytes for prefix in ledger.prefixes()) <= ledger.excess == 5 * 2 * MIB


def test_a_replica_that_says_something_else_each_time_leaves_nothing_behind(index, ledger):
    _chain(index, "a", 1, 2)
    _chain(index, "b", 1, 2)
    for number in range(100):
        ledger.register("b", f"model {number}", MIB, 16 * (1 + number % 3))
        ledger.check()
    assert set(ledger.totals()) == {("m", Tier.HBM), ("model 99", Tier.HBM)}
    ledger.register("b", "m", 2 * MIB, 16)
    ledger.check()
    assert ledger.totals() == {("m", Tier.HBM): Totals(held=8 * MIB, distinct=4 * MIB)}
    for name in "abc":
        ledger.forget(name)
    assert (ledger.totals(), ledger.excess) == ({}, 0)

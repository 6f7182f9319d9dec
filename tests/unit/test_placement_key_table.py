"""KeyTable against a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gateway.placement.key_table import LANES, LEAST_BITS, KeyTable, rows_fitting

CAPACITY = 6_000


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_a_dict_while_it_grows_and_churns(seed):
    rng = random.Random(seed)
    table, rows_of = KeyTable(CAPACITY), {}
    bits = rng.choice([11, 64])  # many or few keys that come again
    keys = [rng.getrandbits(bits) or 1 for _ in range(8_000)]
    for _ in range(60):
        some = rng.choices(keys, k=rng.randrange(400))
        packed = np.array(some, np.uint64)
        if rng.random() < 0.6 and table.room >= packed.size:
            rows, absent = table.add(packed)
            assert {some[i] for i in absent.tolist()} == set(some) - set(rows_of)
            for key, row in zip(some, rows.tolist(), strict=True):
                assert rows_of.setdefault(key, row) == row
        else:
            packed = np.unique(packed)
            rows, slots = table.locate(packed)
            assert rows.tolist() == [rows_of.get(key, 0) for key in packed.tolist()]
            there = rows != 0
            table.drop(rows[there], slots[there])
            for key in packed.tolist():
                rows_of.pop(key, None)
        assert len(table) == len(rows_of)
        assert len(set(rows_of.values())) == len(rows_of)
    table.check()
    absent_keys = np.array([key for key in keys if key not in rows_of], np.uint64)
    assert not table.find(absent_keys).any()
    assert [table.find_one(key) for key in absent_keys[:100].tolist()] == [0] * min(100, absent_keys.size)


def test_a_chain_that_is_added_at_once_has_consecutive_rows():
    table = KeyTable(100)
    rows, absent = table.add(np.arange(5, 15, dtype=np.uint64))
    assert rows.tolist() == list(range(1, 11))
    assert absent.size == 10


def test_rows_are_used_again_and_memory_follows_the_keys():
    table = KeyTable(50_000)
    keys = np.random.default_rng(1).integers(1, 1 << 63, 40_000, dtype=np.int64).astype(np.uint64)
    before = table.nbytes
    for _ in range(10):
        for begin in range(0, keys.size, 4_000):
            table.add(keys[begin : begin + 4_000])
        full = table.nbytes
        rows, slots = table.locate(keys)
        table.drop(rows, slots)
    assert table.top == keys.size + 1
    assert before < full <= 40_000 * (8 + 4 + 20)
    table.check()


def test_a_table_fits_into_what_it_is_said_to_fit_into():
    for limit in (20_000, 1 << 20, 10_000_000):
        rows = rows_fitting(limit, 8 + 4)
        table = KeyTable(rows)
        keys = np.arange(1, rows + 1, dtype=np.uint64)
        for begin in range(0, rows, 8_000):
            table.add(keys[begin : begin + 8_000])
            assert table.nbytes <= limit
        assert table.room == 0
        assert len(table) == rows > limit / 60
    assert rows_fitting(LANES << LEAST_BITS, 8) == 0


def test_a_table_that_fills_up_before_it_has_taken_the_place_of_another_grows_again():
    table, keys = KeyTable(100_000), np.arange(1, 60_000, dtype=np.uint64)
    for begin, end in ((0, 600), (600, 700), (700, 5_000), (5_000, 5_100), (5_100, 50_000)):
        rows, absent = table.add(keys[begin:end])
        assert absent.size == end - begin
        assert (table.find(keys[begin:end]) == rows).all()
        table.check()
    assert len(table) == 50_000

"""Retries stay a share of the requests, however the failures come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.path.retry_budget import INITIAL, MAXIMUM, RetryBudget


@given(st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]), st.lists(st.integers(0, 5), max_size=200))
def test_retries_are_a_share_of_the_requests(ratio: float, wanted: list[int]) -> None:
    """Each request asks for some number of retries; at no time were there more than the share and a few at start."""
    budget = RetryBudget(ratio)
    taken = 0
    for requests, tries in enumerate(wanted, 1):
        budget.request()
        taken += sum(budget.take() for _ in range(tries))
        assert taken <= ratio * requests + min(INITIAL, INITIAL * ratio * 10) + 1e-9


def test_a_total_failure_costs_no_more_than_the_share() -> None:
    budget = RetryBudget(0.2)
    taken = 0
    for _ in range(1_000):
        budget.request()
        while budget.take():
            taken += 1
    assert 195 <= taken <= 200 + INITIAL


def test_a_single_failure_at_start_is_retried() -> None:
    budget = RetryBudget(0.2)
    budget.request()
    assert budget.take()


@pytest.mark.parametrize("requests", [1, 1_000])
def test_a_ratio_of_zero_means_no_retries(requests: int) -> None:
    budget = RetryBudget(0.0)
    for _ in range(requests):
        budget.request()
    assert not budget.take()


def test_a_long_quiet_time_saves_up_no_storm() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.request()
    assert sum(budget.take() for _ in range(10_000)) == MAXIMUM

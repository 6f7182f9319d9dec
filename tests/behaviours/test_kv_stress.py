"""Two minutes of requests over a fleet whose parts are frozen, killed and cleared all the time. See `stress.driver`."""

from __future__ import annotations

import asyncio

import pytest
from stress.driver import storm

STORM_S = 120.0


@pytest.mark.stress
@pytest.mark.parametrize("seed", [20], ids="seed-{}".format)
def test_answers_stay_right_and_nothing_is_left(seed: int) -> None:
    report = asyncio.run(storm(seed, STORM_S))
    # The storm was one: everything that it is about has happened.
    done = {outcome.partition(":")[0] for outcome in report.fetches}
    assert {"fetched", "partial", "local", "declined", "missed", "refused", "failed", "cancelled"} <= done, report
    assert set(report.transports) == {"shm", "tcp"}, report
    assert {"freeze engine", "freeze agent", "kill engine", "kill agent", "reset"} == set(report.faults), report
    assert min(report.answers["right"], report.answers["left"], report.answers["killed"], report.checks) > 0, report
    assert report.cached_tokens > 0

"""A replica that joins a busy fleet, and is slow while it warms up, which nobody knows."""

from __future__ import annotations

import random
from typing import NamedTuple

from placement_fleet import Fleet, Request, prompt

JOINS_S, WARM_S, SLOW_START_S = 15.0, 15.0, 30.0


class Seen(NamedTuple):
    """Of a new replica: its part of the requests in its first 5 s and after its slow start, where 1 is a fair share,
    and the longest wait for a first token there; and the 99th percentile of all waits until its start is over."""

    at_first: float
    in_the_end: float
    longest_s: float
    p99_s: float


def join(seed: int, slow_start_s: float, *, slow: float = 5.0) -> Seen:
    """Four replicas at 0.7 of what they can prefill, whose full caches make the fifth's room worth something: chats
    that begin with one of ten system prompts, half of them new, half going on."""
    rng = random.Random(seed)
    fleet = Fleet(4, speed=10_000.0, capacity_blocks=2_000, slow_start_s=slow_start_s)
    systems = [prompt(-1 - at, 1_000).keys for at in range(10)]
    chats: list[tuple[int, int, int]] = []
    rows: list[tuple[float, str, float]] = []
    at, new = 0.0, ""
    while at < JOINS_S + SLOW_START_S + 15:
        at += rng.expovariate(0.7 * 4 * fleet.speed / 2_200)
        if at >= JOINS_S and not new:
            fleet.advance(at)
            new = fleet.add(warm_at=at + WARM_S, slow=slow).id
        if chats and rng.random() < 0.5:
            chat, tokens, system = chats.pop(rng.randrange(len(chats)))
            tokens += rng.randrange(200, 1_500)
        else:
            chat, tokens, system = len(rows), rng.randrange(1_500, 6_000), rng.randrange(10)
        request = Request(at, prompt(chat, tokens, shared=systems[system]), rng.randrange(50, 300))
        rows.append((at - JOINS_S, fleet.submit(request).replica, fleet.waits[-1]))
        chats = [*chats, (chat, tokens, system)][-300:]
    fleet.placer.check()

    def share(begin: float, end: float) -> float:
        served = [replica for since, replica, _ in rows if begin <= since < end]
        return 5 * served.count(new) / len(served)

    starting = sorted(wait for since, _, wait in rows if 0 <= since < SLOW_START_S)
    longest = max(wait for _, replica, wait in rows if replica == new)
    return Seen(share(0, 5), share(SLOW_START_S, 1e9), longest, starting[int(0.99 * len(starting))])


def test_fewer_wait_for_a_replica_that_warms_up_and_it_gets_its_share_in_the_end() -> None:
    at_once = [join(seed, 0.0) for seed in range(3)]
    slowly = [join(seed, SLOW_START_S) for seed in range(3)]
    assert sum(seen.longest_s for seen in slowly) < 0.75 * sum(seen.longest_s for seen in at_once)
    assert sum(seen.p99_s for seen in slowly) < 0.8 * sum(seen.p99_s for seen in at_once)
    assert sum(seen.at_first for seen in slowly) < sum(seen.at_first for seen in at_once)
    assert all(seen.at_first > 0.1 and 0.8 < seen.in_the_end < 1.25 for seen in slowly), "it is not starved"


def test_one_that_is_not_slow_is_not_flooded_and_not_starved() -> None:
    at_once, slowly = join(0, 0.0, slow=1.0), join(0, SLOW_START_S, slow=1.0)
    assert at_once.at_first < 1.5, "the bounds and its own queue see to that"
    assert 0.3 < slowly.at_first < 1.0
    assert 0.8 < slowly.in_the_end < 1.25
    assert slowly.p99_s < 1.5 * at_once.p99_s

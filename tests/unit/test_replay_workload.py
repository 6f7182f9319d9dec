"""Chains, sessions and who waits for whom."""

from __future__ import annotations

from array import array

import pytest
from replay_support import chats

from gateway.errors import TraceError
from gateway.replay.rows import Row, Rows, Runs, Turn
from gateway.replay.workload import build, infer_sessions, spread_ticks


def row(at: float, ids: list[int], session: object = None, gap_s: float | None = None) -> Row:
    return Row(at, 512 * len(ids) or 1, 1, session, array("Q", ids), gap_s)  # type: ignore[arg-type]


def test_a_block_is_the_whole_chain_up_to_it() -> None:
    made = build(Rows([row(0, [1, 2, 3]), row(1, [1, 9, 3]), row(2, [2, 3])], 512))
    assert made.chains == [(0, 1, 2), (0, 3, 4), (5, 6)]
    assert made.parents == [-1, 0, 1, 0, 3, -1, 5]


def test_fine_blocks_are_merged_and_a_part_of_one_is_no_block() -> None:
    ids = Runs([(0, 8), (100, 8), (200, 3)])
    made = build(Rows([Row(0, 1_200, 1, None, ids), Row(1, 1_100, 1, None, Runs([(0, 8), (100, 7)]))], 64))
    assert made.block == 512
    assert made.chains == [(0, 1), (0,)]


def test_requests_are_in_order_of_time_from_zero() -> None:
    made = build(chats(1))
    assert made.times[0] == 0 and made.times == sorted(made.times)
    assert len({len(made), len(made.tokens), len(made.chains), len(made.sessions), len(made.follows)}) == 1
    assert not made.closed and made.starts == list(range(len(made)))


def test_in_a_closed_loop_each_request_waits_for_the_one_before() -> None:
    made = build(chats(1, gaps=True))
    assert made.closed
    assert len(made.starts) == 40
    for i, follower in enumerate(made.follows):
        if follower >= 0:
            assert made.sessions[i] == made.sessions[follower] and follower > i
    assert sorted([*made.starts, *(each for each in made.follows if each >= 0)]) == list(range(len(made)))


def test_sessions_of_a_trace_that_names_none() -> None:
    chains = [(0, 1, 2), (0, 1, 3), (0, 4), (0, 1, 2, 5), (9,), (9, 10), (0, 1, 3, 6, 7)]
    assert infer_sessions(chains) == [0, 0, 2, 0, 4, 5, 0]


def test_turns_belong_to_the_chat_that_began() -> None:
    turns = [(1, -1), (2, 1), (3, -1), (4, 2), (5, 99)]
    made = build(Rows([row(at, [at], Turn(*turn)) for at, turn in enumerate(turns)], 512))
    assert made.sessions == [1, 1, 3, 1, 5]


def test_a_sample_is_of_whole_sessions_and_seeded() -> None:
    whole = build(chats(1))
    one, same, other = (build(chats(1), sessions=10, seed=seed) for seed in (1, 1, 2))
    assert set(one.sessions) != set(other.sessions)
    assert one == same
    assert len(set(one.sessions)) == 10
    assert all(one.sessions.count(session) == whole.sessions.count(session) for session in set(one.sessions))


def test_there_is_no_sample_of_sessions_that_are_not_named() -> None:
    with pytest.raises(TraceError, match="--sessions-per-replica"):
        build(Rows([row(0, [1])], 512), sessions=1)


def test_what_a_coarse_clock_put_at_one_instant_is_spread_over_its_tick() -> None:
    times = [0.0] * 5 + [3.0] * 4 + [9.0] * 3 + [12.0]
    spread = spread_ticks(times, seed=1)
    assert spread == sorted(spread) and len(set(spread)) == len(times)
    assert all(before <= after < before + 3 for before, after in zip(times, spread, strict=True))
    assert spread == spread_ticks(times, seed=1) != spread_ticks(times, seed=2)
    assert spread_ticks([0.0, 1.0, 5.0], seed=1) == [0.0, 1.0, 5.0], "a clock that tells them apart is believed"
    assert spread_ticks([4.0, 4.0], seed=1) == [4.0, 4.0], "a single instant has no tick"

"""The main job: recorded conversations through the gateway with the official client, on real engines and agents."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chats import play, read_chats, requests_of, summary
from cluster_support import READY_S, tiny_cluster

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "tau_airline_10.jsonl"
AT_ONCE = 4


def test_predicted_cached_tokens_are_those_of_the_engine() -> None:
    """On a deployment of its own: caches full of other tests' prompts would be evicted from between a placement and its
    prefill, which no report can tell in time."""
    chats = read_chats(FIXTURE, 10)
    with tiny_cluster() as cluster:
        cluster.start_all()
        asyncio.run(cluster.wait_ready(READY_S))
        turns = asyncio.run(play(cluster, chats, at_once=AT_ONCE))
    assert len(turns) == sum(len(requests_of(chat)) for chat in chats)
    assert all(turn.text for turn in turns), "every reply parses and says something"
    assert {turn.identity for turn in turns} == {"exact"}
    misses = [(at, turn) for at, turn in enumerate(turns) if abs(turn.predicted - turn.cached) > 16]
    assert summary("ours", turns)["within_one_block"] >= 0.95, misses
    # The first turns arrive together, while the prefix that they share is still being computed.
    steady = summary("ours", turns[AT_ONCE:])
    assert steady["mean_abs_error_tokens"] < 16, steady
    follow_ups = [turn for turn in turns if turn.cached > 1000]
    assert len(follow_ups) > len(turns) / 2, "conversations stay with the replica that holds them"

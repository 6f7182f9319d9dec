"""Seven policies against the simulation that specifies them, on every recorded trace that lies beside the checkout."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from replay_support import LLAMA, TRACES, beginning, trace

from gateway.replay.formats import read
from gateway.replay.replay import replay
from gateway.replay.result import Result
from gateway.replay.scenario import Scenario
from gateway.replay.workload import build
from kvstore.cost import LinkEstimate

POLICIES = {
    "round-robin": "rr",
    "least-loaded": "least",
    "session-hash": "session",
    "first-block-hash": "first",
    "chwbl@4": "chwbl@4",
    "longest-match": "greedy",
    "prefill-decode-blocks": "dynamo",
    "ttft@4": "ttft@4",
    "one-big-cache": "oracle",
}
"""Our names and the referee's. Its random placements come from another generator and are not compared."""


@pytest.fixture(scope="module")
def referee() -> ModuleType:
    """The simulation, as it lies beside the checkout."""
    path = TRACES / "simulate.py"
    if not path.exists():
        pytest.skip("no simulate.py beside the checkout")
    spec = importlib.util.spec_from_file_location("simulate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agree(ours: Result, theirs: dict[str, Any]) -> None:
    """The law is 0.1 points of hit rate and 2 % of mean TTFT. The arithmetic is the same, so it holds far closer."""
    assert ours.hit_rate == pytest.approx(theirs["hit"], abs=1e-9), ours.policy
    assert ours.ttft_mean == pytest.approx(theirs["ttft_mean"], rel=1e-6), ours.policy
    for name, key in (
        ("ttft_p50", "p50"),
        ("ttft_p99", "p99"),
        ("copies", "copies"),
        ("excess_gib_mean", "excess_gib_mean"),
        ("excess_gib_max", "excess_gib_max"),
        ("work_max_over_mean", "work_imb"),
        ("spill_rate", "spill"),
        ("fetched_share", "fetched"),
    ):
        assert getattr(ours, name) == pytest.approx(theirs[key], rel=1e-6, abs=1e-9), (ours.policy, name)


def compare(referee: ModuleType, path: Path, *, sessions: int = 0, **given: Any) -> None:
    """All policies on one file, both ways."""
    seed, fetch = given.get("seed", 0), given.get("fetch", 0.0)
    ours = build(read([path]), sessions=sessions, seed=seed)
    theirs = referee.Trace(path, sessions=sessions, seed=seed)
    assert ours.chains == theirs.chains and ours.sessions == theirs.sid
    scenario = Scenario(
        physics=LLAMA,
        cache_tokens=given.get("cache_tokens", 1_000_000),
        utilization=given.get("utilization", 0.5),
        seed=seed,
        link=LinkEstimate(0.002, fetch * 1e9) if fetch else None,
    )
    fetching: list[float] = []
    for name, other in POLICIES.items():
        found = referee.simulate(
            theirs,
            scenario.replicas,
            scenario.cache_tokens,
            other,
            util=scenario.utilization,
            seed=seed,
            peer_gbps=fetch,
        )
        agree(replay(ours, scenario, name), found)
        fetching.append(found["fetched"])
    assert any(fetching) is bool(fetch), "the case is looked at"


@pytest.mark.parametrize("fetch", [0.0, 25.0])
def test_chats_of_mooncake(referee: ModuleType, tmp_path: Path, fetch: float) -> None:
    path = beginning(trace("mooncake_conversation_h1"), 2_000, tmp_path)
    compare(referee, path, cache_tokens=200_000, fetch=fetch)


@pytest.mark.parametrize("fetch", [0.0, 25.0])
def test_agents_in_a_closed_loop(referee: ModuleType, tmp_path: Path, fetch: float) -> None:
    path = beginning(trace("agentic_coding_a"), 4_000, tmp_path)
    compare(referee, path, utilization=0.0, seed=2, sessions=20, fetch=fetch)


def test_tool_calling_chats(referee: ModuleType) -> None:
    compare(referee, trace("tau_airline_a"), cache_tokens=20_000)


def test_questions_about_documents(referee: ModuleType) -> None:
    compare(referee, trace("loogle_docqa_a"), cache_tokens=100_000)


def test_chats_of_bailian(referee: ModuleType, tmp_path: Path) -> None:
    """No such trace is at hand: chats that branch, in blocks of 16 tokens, of which 32 are one of ours."""
    rng = random.Random(5)
    chats: list[tuple[int, list[int]]] = []
    lines = []
    for chat in range(300):
        parent, ids = (-1, [0, 1]) if rng.random() < 0.4 or not chats else rng.choice(chats)
        ids = [*ids, *(rng.randrange(10**6) for _ in range(rng.randrange(10, 120)))]
        chats.append((chat, ids))
        row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": chat * 0.7, "type": "text", "turn": 1}
        lines.append(json.dumps(row | {"input_length": 16 * len(ids), "output_length": 60, "hash_ids": ids}))
    path = tmp_path / "bailian.jsonl"
    path.write_text("\n".join(lines))
    compare(referee, path, cache_tokens=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", [0.0, 25.0])
@pytest.mark.parametrize("name", ["mooncake_conversation_h1", "tau_airline_a", "loogle_docqa_a"])
def test_whole_traces(referee: ModuleType, name: str, fetch: float) -> None:
    compare(referee, trace(name), fetch=fetch)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", [0.0, 25.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_whole_hour_of_agents(referee: ModuleType, seed: int, fetch: float) -> None:
    compare(referee, trace("agentic_coding_a"), sessions=96, utilization=0.0, seed=seed, fetch=fetch)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", [0.0, 25.0])
def test_all_agents_at_once(referee: ModuleType, fetch: float) -> None:
    compare(referee, trace("agentic_coding_a"), fetch=fetch)

"""Workloads for replay tests: traces that lie beside the checkout, and small made-up ones."""

from __future__ import annotations

import gzip
import random
from array import array
from itertools import islice
from pathlib import Path

import pytest

from gateway.replay.physics import KNOWN
from gateway.replay.rows import Row, Rows
from gateway.replay.scenario import Scenario
from gateway.replay.workload import Workload, build

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
LLAMA = KNOWN["llama-3.1-8b"]


def trace(name: str) -> Path:
    """A recorded trace; the test is skipped where it is not there."""
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no trace {path.name} beside the checkout")
    return path


def beginning(path: Path, lines: int, into: Path) -> Path:
    """The first lines of a trace as a file of their own."""
    short = into / f"{lines}-{path.name}"
    with gzip.open(path) as whole, gzip.open(short, "wb") as part:
        part.writelines(islice(whole, lines))
    return short


def chats(seed: int, *, sessions: int = 40, turns: int = 6, block: int = 512, gaps: bool = False) -> Rows:
    """Sessions that begin with one of three system prompts and grow by a few blocks a turn."""
    rng = random.Random(seed)
    rows = []
    fresh = 1_000
    for session in range(sessions):
        system = rng.randrange(3)
        ids = [10 * system + each for each in range(4)]
        at = rng.uniform(0, 60)
        for turn in range(turns):
            added = rng.randrange(1, 4)
            ids = [*ids, *range(fresh, fresh + added)]
            fresh += added
            tokens = len(ids) * block - rng.randrange(block)
            gap_s = rng.uniform(0, 5) if gaps and turn else None
            rows.append(Row(at, tokens, rng.randrange(1, 400), f"s{session}", array("Q", ids), gap_s))
            at += rng.uniform(1, 20)
    rng.shuffle(rows)
    return Rows(rows, block)


def chat_workload(seed: int, *, gaps: bool = False) -> Workload:
    """The same, ready to be replayed."""
    return build(chats(seed, gaps=gaps))


def scenario(**changes: object) -> Scenario:
    """Four replicas of Llama-3.1-8B with room for a few sessions each."""
    given: dict[str, object] = {"physics": LLAMA, "replicas": 4, "cache_tokens": 30_000}
    return Scenario(**(given | changes))  # type: ignore[arg-type]

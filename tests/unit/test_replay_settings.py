"""Sweeps and recommendations: what they try, and that the rule picks by it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from replay_support import chat_workload, chats, scenario

from gateway.cli import main
from gateway.replay.charts import tradeoff, waits
from gateway.replay.recommend import MARGINS, WITHIN, HotPrefix, hot_prefix, recommend
from gateway.replay.replay import play
from gateway.replay.result import Tally
from gateway.replay.rows import Row, Rows
from gateway.replay.scenario import Scenario
from gateway.replay.sweep import EPSILONS, sweep
from gateway.replay.workload import Workload, build
from kvstore.cost import LinkEstimate

LINK = LinkEstimate(0.002, 25e9)
NAMESPACE = "{http://www.w3.org/2000/svg}"


class Player:
    """Replays, and remembers what was asked."""

    def __init__(self, workload: Workload, watched: int | None = None) -> None:
        self.workload = workload
        self.watched = watched
        self.asked: list[tuple[str, float, float]] = []

    def __call__(self, scenario: Scenario, name: str, label: str) -> Tally:
        self.asked.append((name, scenario.placement.eps, scenario.placement.fetch_margin))
        return play(self.workload, scenario, name, watched=self.watched)


def test_a_sweep_is_ours_at_each_epsilon() -> None:
    workload = chat_workload(2)
    player = Player(workload)
    points = list(sweep(scenario(utilization=1.5), player))
    assert [point.epsilon for point in points] == list(EPSILONS)
    assert player.asked == [("ours", epsilon, 0.1) for epsilon in EPSILONS]
    assert points[0].result.spill_rate > points[-1].result.spill_rate
    assert list(points[0].fields())[:2] == ["epsilon", "policy"]


@pytest.mark.parametrize("link", [None, LINK])
def test_the_least_duplication_wins_among_equal_times(link: LinkEstimate | None) -> None:
    workload = chat_workload(2)
    player = Player(workload)
    found = recommend(workload, scenario(utilization=1.5, link=link), player, None)
    asked = [(epsilon, 0.1) for epsilon in EPSILONS]
    if link:
        asked += [(found.epsilon, margin) for margin in MARGINS if margin != 0.1]
    assert [(each.epsilon, each.fetch_margin) for each in found.tried] == asked
    assert player.asked == [*(("ours", *each) for each in asked), ("least-loaded", 1.0, 0.1)]
    margin = 0.1 if found.fetch_margin is None else found.fetch_margin
    (best,) = [each for each in found.tried if (each.epsilon, each.fetch_margin) == (found.epsilon, margin)]
    assert best.ttft_mean == found.ttft_mean < found.least_loaded_ttft_mean
    rivals = (
        found.tried[: len(EPSILONS)] if not link else [each for each in found.tried if each.epsilon == best.epsilon]
    )
    least = min(each.ttft_mean for each in rivals)
    assert best.ttft_mean <= least * (1 + WITHIN)
    assert all(
        best.excess_gib_mean <= each.excess_gib_mean for each in rivals if each.ttft_mean <= least * (1 + WITHIN)
    )
    assert (found.fetch_margin is None) is (link is None)


def test_the_hot_prefix_is_the_longest_that_a_replicas_share_has() -> None:
    def row(at: int, *ids: int) -> Row:
        return Row(float(at), 512 * len(ids), 1, None, array("Q", ids))

    prompts = [(1, 2, 3), (1, 2, 4), (1, 2), (1, 9), (1,), (7, 8), (5,), (6,)]
    workload = build(Rows([row(at, *ids) for at, ids in enumerate(prompts)], 512))
    assert hot_prefix(workload, 4) == HotPrefix(block=1, blocks=2, requests=3)
    assert hot_prefix(workload, 2) == HotPrefix(block=0, blocks=1, requests=5)
    assert hot_prefix(workload, 1) is None


def test_copies_of_the_hot_prefix_are_counted_over_time() -> None:
    workload = chat_workload(2)
    watched = hot_prefix(workload, 4)
    assert watched is not None
    found = recommend(workload, scenario(), Player(workload, watched.block), watched)
    assert found.hot is not None
    assert (found.hot.tokens, found.hot.requests) == (4 * 512, watched.requests / 240)
    assert 1 <= found.hot.copies <= 4
    one = play(workload, scenario(cache_tokens=10**9), "one-big-cache", watched=watched.block)
    assert 0 < one.watched_copies <= 1


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A small trace in our own format."""
    path = tmp_path / "chats.jsonl"
    lines: list[dict[str, Any]] = [{"meta": {"block": 512}}]
    for row in chats(3).rows:
        lines.append({"t": row.at, "in": row.tokens, "out": row.output, "r": [[each, 1] for each in row.ids]})
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_the_command_sweeps(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "out.svg"
    command = ["replay", trace, "--cache-tokens", "30000", "--sweep", "epsilon", "--plot", str(svg)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[0] == "epsilon"
    assert [float(line.split()[0]) for line in lines[4:]] == list(EPSILONS)
    ElementTree.fromstring(svg.read_text())
    assert main([*command, "--json"]) == 0
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [point["epsilon"] for point in points] == list(EPSILONS)


def test_the_command_recommends(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", trace, "--cache-tokens", "30000", "--recommend", "--fetch-gigabytes-per-s", "25"]
    assert main(command) == 0
    out = capsys.readouterr().out
    for told in (
        "\nplacement.epsilon: ",
        "\nfetch.margin: ",
        "\ncopies: ",
        "\nmean TTFT: ",
        "\nhot prefix: 2,048 tokens",
    ):
        assert told in out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"epsilon", "copies", "fetch_margin", "hot", "tried"}
    with pytest.raises(SystemExit):
        main([*command, "--sweep", "epsilon"])


def test_the_command_draws_how_long_requests_wait(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "out.svg"
    assert main(["replay", trace, "--policy", "ours,random", "--plot", str(svg)]) == 0
    texts = [each.text for each in ElementTree.fromstring(svg.read_text()).iter(f"{NAMESPACE}text")]
    assert {"ours", "random", "seconds"} <= set(texts)
    assert main(["replay", trace, "--policy", "random", "--plot", str(tmp_path / "no" / "out.svg")]) == 2
    assert "--plot: " in capsys.readouterr().err


def test_drawings_of_little() -> None:
    assert "ours" in waits([("ours", [0.5])])
    point = next(iter(sweep(scenario(), Player(chat_workload(2)))))
    svg = tradeoff([(0.5, point.result), (1.0, point.result)])
    assert [each.text for each in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")][-1] == "0.5, 1"

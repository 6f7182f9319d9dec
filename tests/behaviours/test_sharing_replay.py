"""What several gateways do to waiting times, replayed: they know of each other's placements 10 ms later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replay_support import beginning, trace

from gateway.cli import main

GATEWAYS = 4


def test_load_is_shared_between_gateways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean TTFT of four gateways over eight replicas is within 5 % of that of one, at the same load.

    The ratio of two replays by one and the same cost model: 1.026 when this was written.
    """
    file = str(beginning(trace("mooncake_conversation_h1"), 6_000, tmp_path))
    means = []
    for gateways in (1, GATEWAYS):
        flags = ["--policy", "ours", "--report-delay", "0.25", "--spread-timestamps", "--json"]
        assert main(["replay", file, *flags, "--replicas", "8", "--gateways", str(gateways)]) == 0
        means.append(json.loads(capsys.readouterr().out)["ttft_mean"])
    assert means[1] <= 1.05 * means[0], means

"""`prefix-gateway replay` as a user meets it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from replay_support import chats

from gateway.cli import main
from gateway.replay.policies import NAMES
from gateway.replay.progress import Progress

KEYS = [
    *("policy", "replicas", "cache_tokens", "seed", "hit_rate", "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99"),
    *("copies", "excess_gib_mean", "excess_gib_max", "work_max_over_mean", "spill_rate", "fetched_share"),
]


@pytest.fixture
def native(tmp_path: Path) -> str:
    """A small trace in our own format."""
    path = tmp_path / "chats.jsonl"
    lines: list[dict[str, Any]] = [{"meta": {"block": 512}}]
    for row in chats(3).rows:
        ids = [[each, 1] for each in row.ids]
        lines.append({"t": row.at, "in": row.tokens, "out": row.output, "sid": row.session, "r": ids})
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_json_object_a_line_for_each_policy(native: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", native, "--replicas", "3", "--cache-tokens", "30000", "--seed", "5", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["policy"] for result in results] == list(NAMES)
    for result in results:
        assert list(result) == KEYS
        assert (result["replicas"], result["cache_tokens"], result["seed"]) == (3, 30_000, 5)
        assert 0 < result["hit_rate"] < 1 and result["fetched_share"] == 0
        assert 0 < result["ttft_p50"] <= result["ttft_p90"] <= result["ttft_p99"]
        assert result["copies"] >= 1 and 0 <= result["excess_gib_mean"] <= result["excess_gib_max"]
        assert 1 <= result["work_max_over_mean"] <= 3 and 0 <= result["spill_rate"] <= 1


def test_a_table_that_says_what_was_replayed(native: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", native, "--policy", "chwbl@4,one-big-cache", "--utilization", "0", "--report-delay", "0.25"]
    assert main([*command, "--fetch-gigabytes-per-s", "25", "--gateways", "2", "--keep-copies"]) == 0
    first, second, blank, head, one, two = capsys.readouterr().out.splitlines()
    assert first.startswith("240 requests in 40 sessions over ") and "(1 times the recorded pace)" in first
    assert second == (
        "8 replicas of llama-3.1-8b, 1,000,000 tokens of KV each; 2 gateways, reports 0.25 s old, exact estimates, "
        "25 GB/s between replicas, which keep what peers read"
    )
    assert not blank and head.split()[0] == "policy"
    assert one.startswith("chwbl@4 ") and two.startswith("one-big-cache ")


def test_a_request_log_keeps_its_own_times_and_says_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9_000}]}
    log = tmp_path / "log"
    log.write_text("".join(json.dumps({"timestamp": 1e9 + 60 * at, "body": body}) + "\n" for at in range(3)))
    assert main(["replay", str(log), "--policy", "round-robin"]) == 0
    first, _, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("3 requests in 1 sessions over 120 s (1 times the recorded pace)")
    assert third.startswith("3 requests do not say how long their answer was")


def test_the_same_arguments_give_the_same_result(native: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        command = ["replay", native, "--json", "--seed", seed, "--report-delay", "0.25", "--estimate-error", "0.3"]
        assert main([*command, "--gateways", "2", "--sessions-per-replica", "3"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--replicas", "0"], "--replicas: expected a whole number from 1 to 1024, got '0'"),
        (["--replicas", "x"], "--replicas: "),
        (["--cache-tokens", "-1"], "--cache-tokens: "),
        (["--gateways", "65"], "--gateways: "),
        (["--seed", "-1"], "--seed: "),
        (["--utilization", "nan"], "--utilization: "),
        (["--report-delay", "-1"], "--report-delay: "),
        (["--estimate-error", "x"], "--estimate-error: "),
        (["--fetch-gigabytes-per-s", "-2"], "--fetch-gigabytes-per-s: "),
        (["--sessions-per-replica", "0.01"], "--sessions-per-replica: 0.01 is less than one session in all"),
        (["--model", "nope"], "--model: nope is neither a file nor one of llama-3.1-8b"),
        (["--tflops", "0"], "--tflops: "),
        (["--policy", "best"], "--policy: 'best' is not one of all, "),
        (["--policy", "ttft@0"], "--policy: 'ttft@0'"),
        (["--policy", ""], "--policy: ''"),
    ],
)
def test_a_bad_flag_is_told_in_one_line(
    flags: list[str], told: str, native: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", native, *flags]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"prefix-gateway: {told}") and err.count("\n") == 1


def test_a_bad_trace_is_told_before_anything_is_replayed(native: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(native).open("a") as lines:
        lines.write('\n{"t": 1, "in": 5}\n')
    assert main(["replay", native, "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"prefix-gateway: {native}:242: has none of the fields")


class Terminal(io.StringIO):
    """A stream that says that somebody watches."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_wiped_at_the_end() -> None:
    now, stream = 0.0, Terminal()
    progress = Progress(stream, "ttft@4", 1_000, lambda: now, step=10)
    for done in range(1, 501):
        now += 0.02
        progress(done)
    assert stream.getvalue().endswith("50%  10 s left \x1b[K")
    assert 20 < stream.getvalue().count("\r") <= 50
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_there_is_no_progress_in_a_file() -> None:
    now, stream = 0.0, io.StringIO()
    progress = Progress(stream, "ttft@4", 1_000, lambda: now, step=10)
    for done in range(1, 1_001):
        now += 1
        progress(done)
    progress.close()
    assert not stream.getvalue()

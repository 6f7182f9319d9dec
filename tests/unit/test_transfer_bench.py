"""`bench transfer` from end to end, small: what it reports, not how fast anything is."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from transfer_support import needs_nixl

from replica_agent.bench.gpu import gpu_speeds
from replica_agent.bench.recompute import recompute
from replica_agent.bench.report import Report, render_text
from replica_agent.bench.transfer import Options, measure


async def test_every_path_that_is_asked_for_is_measured() -> None:
    report = await measure(Options(4, 8_192, 2, ("tcp", "shm", "loopback", "gpu"), idle_s=0.01, model="tiny"))
    assert [speed.path for speed in report.speeds if not speed.path.startswith("gpu")] == [
        *("memcpy", "tcp", "shm", "loopback")
    ]
    for speed in report.speeds[:4]:
        assert not speed.failed
        assert min(speed.median_ms, speed.best_gb_s, speed.of_memcpy) > 0
    assert [(whole.path, whole.slots, round(whole.megabytes)) for whole in report.whole] == [
        *(("tcp", 128, 47), ("shm", 128, 47))
    ]
    for whole in report.whole:
        assert not whole.failed
        assert [*whole.steps_ms] == ["decide", "lease", "move", "verify", "confirm", "copy"]
        assert min(*whole.steps_ms.values(), whole.total_ms, whole.memcpy_ms, whole.times_memcpy) > 0
    assert sorted(report.idle_cpu) == ["owner", "reader"]
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    text = render_text(report)
    assert "a whole fetch over shm: 128 slots, 47 MB" in text
    assert report.recompute.tokens == 2_048
    assert report.recompute.by.startswith("the reference engine, tiny")
    assert not report.recompute.not_measured
    assert f"recomputing 2,048 tokens, 47 MB of KV: {report.recompute.ms:,.1f} ms" in text
    assert "x memcpy (" in text.partition("recomputing")[2]


async def test_without_a_model_recomputing_is_estimated_and_says_for_which_speed() -> None:
    found = await recompute("nothing-like-it")
    assert found.by == "estimated for SmolLM2-135M at 1 TFLOP/s"
    assert "nothing-like-it" in found.not_measured
    # 2 x 106 million weights x 2,048 tokens, and attention.
    assert 430 < found.ms < 700


@needs_nixl
async def test_a_push_is_measured_in_a_process_without_shared_memory() -> None:
    report = await measure(Options(4, 8_192, 2, ("nixl-push",), idle_s=0.01, model="tiny"))
    (speed,) = [speed for speed in report.speeds if speed.path == "nixl-push over TCP"]
    assert not speed.failed
    assert speed.median_ms > 0


@pytest.mark.slow
def test_the_paths_of_a_gpu_run() -> None:
    """On the processor: the same calls."""
    speeds = gpu_speeds(4, 4_096, 1, device="cpu")
    assert [(speed.path, speed.failed) for speed in speeds] == [
        *((path, "") for path in ("gpu, CUDA IPC", "gpu, to host", "gpu, from host"))
    ]


def test_an_unknown_path_is_named() -> None:
    command = (sys.executable, "-m", "gateway", "bench", "transfer", "--paths", "smoke,shm")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--paths: smoke is none of shm, nixl, tcp, loopback, nixl-push, gpu" in done.stderr

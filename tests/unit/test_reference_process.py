"""The engine as a process: start, refusals, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from reference_support import DEADLINE_S, tiny_directory

COMMAND = [sys.executable, "-m", "replica_agent.reference"]
FREE = ["--port", "0", "--kv-events-endpoint", "tcp://127.0.0.1:*", "--kv-replay-endpoint", "tcp://127.0.0.1:*"]


@contextmanager
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def refuse(*arguments: str, **environment: str) -> list[str]:
    """Lines on stderr of a process that must not start."""
    result = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | environment,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_one_line_answers_and_leaves_with_zero(number: signal.Signals) -> None:
    tiny_directory()
    process = subprocess.Popen(
        [*COMMAND, "--model", "tiny", "--threads", "1", *FREE], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.search(r"tiny \(float32\), 1024 blocks of 16 tokens, (http://\S+), events tcp\S+, replay tcp", line)
        assert match, line
        with httpx.stream(
            "POST",
            f"{match[1]}/v1/completions",
            json={"prompt": "the", "max_tokens": 10_000, "ignore_eos": True, "stream": True},
            timeout=DEADLINE_S,
        ) as response:
            next(response.iter_lines())
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize("flag", ["--port", "--kv-events-endpoint", "--kv-replay-endpoint"])
def test_a_taken_port_is_one_line_that_names_the_flag(flag: str) -> None:
    with taken() as port:
        value = str(port) if flag == "--port" else f"tcp://127.0.0.1:{port}"
        assert refuse("--model", "tiny", *FREE, flag, value) == [f"port {port} is taken: choose another with {flag}"]


def test_an_unknown_model_is_one_line_that_names_the_choices(tmp_path: Path) -> None:
    (line,) = refuse("--model", str(tmp_path), *FREE)
    assert "--model" in line
    assert "smollm2, tiny" in line


def test_a_context_that_cannot_fit_is_refused() -> None:
    (line,) = refuse("--model", "tiny", "--kv-tokens", "512", "--max-model-len", "1024", *FREE)
    assert line.startswith("--max-model-len 1024: more than 512")


def test_unknown_flags_are_refused() -> None:
    assert "--no-such-flag" in refuse("--model", "tiny", "--no-such-flag")[-1]

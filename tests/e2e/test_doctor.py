"""`prefix-gateway doctor` as an operator runs it, on real engines and agents, some of them started wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_support import READY_S, tiny_cluster

from gateway.cli import main
from gateway.demo.cluster import Cluster

COMMAND = str(Path(sys.executable).with_name("prefix-gateway"))


def flags(cluster: Cluster) -> list[str]:
    """Those of a `serve` in front of the cluster."""
    engines = [word for at in range(cluster.count) for word in ("--engine", cluster.engine_url(at))]
    return [*engines, *(word for at in range(cluster.count) for word in ("--agent", cluster.agent_url(at)))]


def test_a_sound_deployment(cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    replicas = [
        {"id": f"replica-{at}", "engine": cluster.engine_url(at), "agent": cluster.agent_url(at)}
        for at in range(cluster.count)
    ]
    config.write_text(yaml.safe_dump({"replicas": replicas}))
    for arguments in (["--config", str(config)], flags(cluster)):
        done = subprocess.run(
            [COMMAND, "doctor", *arguments, "--json"], capture_output=True, text=True, check=False, timeout=READY_S
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert (told["ok"], told["problems"]) == (True, 0)
        assert {finding["code"] for finding in told["findings"]} == {"pool_off"}, "which may be meant"
        assert [(each["engine_name"], each["models"], each["block_size"]) for each in told["replicas"]] == [
            ("reference", ["tiny"], 16)
        ] * cluster.count
        assert all(each["agent_answers"] for each in told["replicas"])


@pytest.fixture
def wrong() -> Iterator[Cluster]:
    """One engine that publishes nothing, in blocks that cannot be named, and its agent."""
    engine_flags = ("--kv-events-endpoint", "none", "--kv-replay-endpoint", "none", "--block-size", "24")
    with tiny_cluster(replicas=1, engine_flags=engine_flags) as running:
        running.start_engine(0)
        running.start_agent(0)
        yield running


def test_what_is_wrong_is_named_with_its_flag(wrong: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def codes() -> dict[str, str]:
        status = main(["doctor", *flags(wrong), "--json"])
        told = json.loads(capsys.readouterr().out)
        assert status == (1 if told["problems"] else 0)
        return {finding["code"]: finding["fix"] for finding in told["findings"]}

    def until(*expected: str) -> dict[str, str]:
        deadline = time.monotonic() + READY_S
        while (found := codes()).keys() != set(expected):
            wrong.check_alive()
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    found = until("events_unconnected", "block_size", "pool_off")
    events = f"tcp://127.0.0.1:{wrong.options.ports.events[0]}"
    assert f"--kv-events-endpoint {events}" in found["events_unconnected"]
    wrong.kill("agent-0")
    until("agent_down")
    wrong.start_agent(0)
    wrong.kill("engine-0")
    until("engine_down")
    assert main(["doctor", *flags(wrong)]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM engine_down" in text and "fix: start the engine" in text and "1 problem, 0 notes" in text


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ([], {}, "replicas"),
        (["--config", "/absent.yaml"], {}, "/absent.yaml"),
        (["--agent", "http://h:1"], {}, "--agent"),
        (["--engine", "h:1"], {}, "replicas[0].engine"),
        (["--engine", "https://h:1"], {"PREFIX_GATEWAY_ENGINE_TLS__CA_FILE": "/absent"}, "engine_tls.ca_file"),
        (["--engine", "http://h:1"], {"PREFIX_GATEWAY_ENGINE_API_KEY_FILE": "/absent"}, "ENGINE_API_KEY_FILE"),
    ],
)
def test_what_it_cannot_look_at_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environ: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | environ)
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err

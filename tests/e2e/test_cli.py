"""The command as a user meets it: what works, and one clear line with exit status 2 where something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from loopback_ports import free_ports
from loopback_server import Handler, LoopbackServer

from gateway.cli import main
from gateway.demo.cluster import Cluster

COMMAND = str(Path(sys.executable).with_name("prefix-gateway"))
DEADLINE_S = 60.0


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    """It ended with one line on stderr that holds these words."""
    assert (done.returncode, done.stdout) == (status, ""), done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("prefix-gateway: ")
    assert all(word in lines[0] for word in words), lines[0]


def refused_here(capsys: pytest.CaptureFixture[str], arguments: list[str], *words: str) -> None:
    """The same of the command run in this process, which is quicker."""
    status = main(arguments)
    out, err = capsys.readouterr()
    refused(subprocess.CompletedProcess(arguments, status, out, err), *words)


@contextlib.contextmanager
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_names_its_flag() -> None:
    (free,) = free_ports(1)
    serve = ("serve", "--engine", "http://127.0.0.1:1")
    with taken() as port:
        refused(
            run(*serve, "--port", str(port), "--admin-port", str(free)), f"127.0.0.1:{port}", "in use", "with --port"
        )
        refused(run(*serve, "--port", str(free), "--admin-port", str(port)), f"{port}", "in use", "with --admin-port")
    refused(run(*serve, "--port", str(free), "--admin-port", str(free)), "--admin-port")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("listen: {prot: 8000}", ["listen", "prot"]),
        ("lisden: {port: 8000}", ["lisden"]),
        ("listen: {port: many}", ["listen.port", "int"]),
        ("listen: 5", ["listen", "5"]),
        ("listen: [1]", ["listen", "[1]"]),
        ("- 1", ["--config", "list"]),
        ("listen: {", ["--config", "not YAML", "line 1"]),
        ("agent_token: secret", ["agent_token", "PREFIX_GATEWAY_AGENT_TOKEN"]),
        ("replicas: [{id: a, engine: ftp://h}]", ["replicas[0].engine", "ftp://h"]),
        ("replicas: []", ["replicas", "--engine"]),
        ("", ["replicas", "--engine"]),
    ],
)
def test_a_bad_configuration_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, words: list[str]
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(config)
    refused_here(capsys, ["serve", "--config", str(path)], *words)


def test_observing_takes_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    refused_here(capsys, ["serve", "--engine", "http://127.0.0.1:1", "--observe-only"], "observe_only", "no replica")


def test_bad_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["serve", "--engine", "http://127.0.0.1:1"]
    refused_here(
        capsys, ["serve", "--config", str(tmp_path / "absent.yaml")], "--config", "absent.yaml", "No such file"
    )
    refused_here(capsys, ["serve", "--agent", "http://127.0.0.1:2"], "--agent")
    refused_here(capsys, [*serve, "--agent", "http://a:1", "--agent", "http://b:1"], "--agent", "2", "1 engines")
    refused_here(capsys, [*serve, "--port", "70000"], "listen.port", "70000")
    refused_here(capsys, [*serve, "--log-level", "loud"], "telemetry.log_level", "loud")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("PREFIX_GATEWAY_LISTEN", "5", "listen"),
        ("PREFIX_GATEWAY_LISTEN", "{", "PREFIX_GATEWAY_LISTEN"),
        ("PREFIX_GATEWAY_LIMIT__X", "5", "PREFIX_GATEWAY_LIMIT__X"),
        ("PREFIX_GATEWAY_AGENT_TOKEN_FILE", "/absent", "PREFIX_GATEWAY_AGENT_TOKEN_FILE"),
    ],
)
def test_bad_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, word: str
) -> None:
    monkeypatch.setenv(name, value)
    refused_here(capsys, ["serve", "--engine", "http://127.0.0.1:1"], word)


@pytest.mark.parametrize("arguments", [(), ("unknown",), ("serve", "--unknown"), ("serve", "--port", "many")])
def test_wrong_usage_shows_the_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: prefix-gateway")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("program", "flag"), [("agent", "--kv-events"), ("engine", "--kv-tokens")])
def test_other_programs_are_reached(program: str, flag: str) -> None:
    done = run(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert flag in done.stdout
    assert run(program, "--no-such-flag").returncode == 2
    assert program in run("--help").stdout


def test_the_duplication_report_of_a_running_gateway(cluster: Cluster) -> None:
    text = run("report", "--admin", cluster.admin_url)
    assert (text.returncode, text.stderr) == (0, "")
    assert [line.split()[0] for line in text.stdout.splitlines()[:3]] == ["KV", "distinct", "duplicated"]
    found = run("report", "--admin", cluster.admin_url, "--json", "--top", "2")
    report = json.loads(found.stdout)
    assert report["held_bytes"] - report["distinct_bytes"] == report["excess_bytes"]
    assert len(report["prefixes"]) <= 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:{free}", "http://127.0.0.1:{public}", "nonsense", "http://[::1"])
def test_a_report_of_nothing_is_told(cluster: Cluster, url: str) -> None:
    """Nobody listens, it is the public port, or it is no URL."""
    (free,) = free_ports(1)
    url = url.format(free=free, public=cluster.options.ports.public)
    done = run("report", "--admin", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"prefix-gateway: --admin {url}: ")
    assert "Traceback" not in done.stderr


class StreamingEngine(LoopbackServer):
    """Streams two events and holds the rest back until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        engine = self

        class Stream(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')

            def do_POST(self) -> None:
                self.body()
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self._chunk(b'data: {"choices": []}\n\n')
                engine.release.wait(DEADLINE_S)
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        super().__init__(Stream)

    def __exit__(self, *_: object) -> None:
        self.release.set()
        super().__exit__()


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def serving(*arguments: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port, admin = free_ports(2)
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [COMMAND, "serve", "--port", str(port), "--admin-port", str(admin), *arguments], stderr=stderr
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{url}/health"), "the gateway serves")
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_drains_an_open_stream(signum: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with StreamingEngine() as engine, serving("--engine", engine.url, log=log) as (process, url):
        until(lambda: answers(f"{url}/ready"), "ready")
        body = {"model": "m", "prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=DEADLINE_S) as stream:
            events = stream.iter_bytes()
            received = next(events)
            process.send_signal(signum)
            until(lambda: not answers(f"{url}/health"), "it takes no new connections")
            assert process.poll() is None, "it waits for the stream"
            engine.release.set()
            received += b"".join(events)
        assert received.endswith(b"data: [DONE]\n\n")
        assert process.wait(DEADLINE_S) == 0
    text = log.read_text()
    assert "Traceback" not in text
    assert "serving http://127.0.0.1:" in text


def test_a_stop_without_work_is_over_at_once(tmp_path: Path) -> None:
    """Also while no engine answers and an agent is looked for in vain: nothing waits for the drain's 30 seconds."""
    engine, agent = free_ports(2)
    log = tmp_path / "stderr"
    flags = ("--engine", f"http://127.0.0.1:{engine}", "--agent", f"http://127.0.0.1:{agent}")
    with serving(*flags, log=log) as (process, _):
        process.terminate()
        assert process.wait(20) == 0
    assert "Traceback" not in log.read_text()


def test_a_gateway_that_only_observes(cluster: Cluster, tmp_path: Path) -> None:
    """Beside a gateway that serves, on the same agents: it reports the same bytes, and answers no client."""
    log = tmp_path / "stderr"
    flags = ["--observe-only"]
    for at in range(cluster.count):
        flags += ["--engine", cluster.engine_url(at), "--agent", cluster.agent_url(at)]
    with serving(*flags, log=log) as (process, url):
        until(lambda: answers(f"{url}/ready"), "the reports are followed")
        told = log.read_text()
        assert "observing only" in told
        admin = told.split("admin on ")[1].split("/admin")[0]
        until(lambda: httpx.get(f"{admin}/admin/replicas", trust_env=False).text.count('"reporting":true') == 3, "all")
        refused = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"}, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "observe_only")
        text = run("report", "--admin", admin)
        assert text.returncode == 0, text
        assert "useful" in text.stdout and "wasted" in text.stdout
        ours, theirs = (
            httpx.get(f"{each}/admin/duplication", trust_env=False).json() for each in (admin, cluster.admin_url)
        )
        assert [ours[name] for name in ("held_bytes", "excess_bytes")] == [
            theirs[name] for name in ("held_bytes", "excess_bytes")
        ]
        assert ours["useful_bytes"] + ours["wasted_bytes"] == ours["excess_bytes"]
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in log.read_text()

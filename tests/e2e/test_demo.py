"""`make demo ARGS=--check` on the tiny model: it plays, it checks itself, and it leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_ports import adjacent_ports

FLAGS = ("--port", "--admin-port", "--engine-port", "--agent-port", "--events-port", "--replay-port")


def command(*arguments: str) -> tuple[list[str], list[int]]:
    """A demo on free ports; the several replicas' ports follow the first of each kind."""
    ports = [adjacent_ports(3) for _ in FLAGS]
    flags = [word for flag, port in zip(FLAGS, ports, strict=True) for word in (flag, str(port))]
    return [sys.executable, "-m", "gateway", "demo", "--model", "tiny", *flags, *arguments], ports


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger in TIME_WAIT
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def processes_with(word: str) -> list[str]:
    """Command lines on this machine that contain a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_the_demo_checks_itself_and_leaves_nothing() -> None:
    arguments, ports = command("--check")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert done.stdout.count("  ok   ") == 8
    assert "\x1b[" not in done.stdout, "plain text when not on a terminal"
    assert all(_free(port + at) for port in ports for at in range(3))
    assert not processes_with(f"--port {ports[2]} ")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(signum: signal.Signals) -> None:
    arguments, ports = command()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "gateway on" in line:
                break
        demo.send_signal(signum)
        rest = demo.stdout.read()
        assert demo.wait(60) == 0, rest
    assert "Traceback" not in rest
    assert not processes_with(f"--port {ports[2]} ")
    assert all(_free(port) for port in ports)


def test_a_taken_port_is_named_with_its_flag() -> None:
    for at, flag in enumerate(FLAGS):
        arguments, ports = command()
        with socket.create_server(("127.0.0.1", ports[at])):
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"prefix-gateway: port {ports[at]} is taken: choose another with {flag}\n"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999"], "--port"),
        (["--engine-port", "-1"], "--engine-port"),
        (["--engine-port", "65535"], "--engine-port"),
        (["--agent-port", "8000"], "--agent-port"),
        (["--replicas", "1"], "--replicas"),
        (["--kv-tokens", "0"], "--kv-tokens"),
    ],
)
def test_flags_that_cannot_work_are_named(flags: list[str], named: str) -> None:
    arguments = [sys.executable, "-m", "gateway", "demo", "--model", "tiny", *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr

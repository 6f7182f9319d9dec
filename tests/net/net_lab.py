"""A small network of network namespaces on one bridge, any of which can be cut off from the rest and joined again.

Takes root and iproute2. Everything made is named after this process, and is undone by `close`, and what a process that
was killed has left is undone by the next one that comes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "pgnet"
_DISABLED, _FORWARDING = "0", "3"


def why_not() -> str:
    """Why no such network can be made here; "" where it can."""
    if missing := [tool for tool in ("ip", "bridge", "tc") if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"{PREFIX}-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Lab:
    """Nodes, each in a namespace with an address of its own, joined by a bridge that this process is on, too.

    Owns the namespaces, the bridge and the cables; ends every process in them at `close`. The network is one of
    198.18.0.0/15, which is set aside for such things.
    """

    def __init__(self) -> None:
        _sweep()
        self._id = os.getpid()
        self._net = f"198.18.{self._id % 255}"
        self._bridge = f"pg{self._id}b"
        self._nodes: dict[str, int] = {}
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self._net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, node: str) -> str:
        """A node of this name; returns its address."""
        number = 10 + len(self._nodes)
        self._nodes[node] = number
        space, cable = self._space(node), self._cable(node)
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        return self.address(node)

    def address(self, node: str) -> str:
        """Where a node is reached."""
        return f"{self._net}.{self._nodes[node]}"

    def within(self, node: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in a node, as one process."""
        return ["ip", "netns", "exec", self._space(node), *command]

    def cut(self, *nodes: str) -> None:
        """No frame passes to or from these nodes any more; nobody is told."""
        for node in nodes:
            _run("bridge", "link", "set", "dev", self._cable(node), "state", _DISABLED)

    def heal(self, *nodes: str) -> None:
        """They are back."""
        for node in nodes:
            _run("bridge", "link", "set", "dev", self._cable(node), "state", _FORWARDING)

    def slow(self, node: str, megabits_per_s: float | None) -> None:
        """What a node sends goes no faster; None takes that back."""
        device = ["tc", "-n", self._space(node), "qdisc"]
        if megabits_per_s is None:
            _run(*device, "delete", "dev", "eth0", "root")
        else:
            rate = ["rate", f"{round(megabits_per_s * 1_000)}kbit", "burst", "16kb", "latency", "1s"]
            _run(*device, "add", "dev", "eth0", "root", "tbf", *rate)

    def sent_bytes(self, node: str) -> int:
        """What a node has sent so far."""
        return int(Path(f"/sys/class/net/{self._cable(node)}/statistics/rx_bytes").read_text())

    def close(self) -> None:
        """Ends the processes, and takes the network away. Can be called again."""
        for node in self._nodes:
            _drop(self._space(node))
        _unplug(self._id)
        self._nodes.clear()

    def left(self) -> list[str]:
        """What is still there of it."""
        spaces = [name for name in _spaces() if f"-{self._id}-" in name]
        return spaces + [name for owner, name in _devices() if owner == self._id]

    def _space(self, node: str) -> str:
        return f"{PREFIX}-{self._id}-{node}"

    def _cable(self, node: str) -> str:
        return f"pg{self._id}n{self._nodes[node]}"


def _sweep() -> None:
    """Takes away what processes have left that are no more."""
    for space in _spaces():
        if (owner := re.fullmatch(rf"{PREFIX}-(\d+)-.*", space)) and not Path(f"/proc/{owner[1]}").exists():
            _drop(space)
    for owner in {owner for owner, _ in _devices()}:
        if not Path(f"/proc/{owner}").exists():
            _unplug(owner)


def _spaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def _devices() -> list[tuple[int, str]]:
    """Bridges and the near ends of cables, with the process whose they are."""
    found = [(re.fullmatch(r"pg(\d+)(b|n\d+)", path.name), path.name) for path in Path("/sys/class/net").iterdir()]
    return [(int(match[1]), name) for match, name in found if match]


def _unplug(owner: int) -> None:
    # A namespace outlives its name as long as the kernel closes its connections; its cable goes at once.
    for each, name in _devices():
        if each == owner:
            subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


def _drop(space: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
        if not found.split():
            break
        for pid in found.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

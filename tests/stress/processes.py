"""Processes that are killed, frozen and started again, and what each of them takes of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

STOP_S = 20.0


class Footprint(NamedTuple):
    """What one process takes: bytes of its own, bytes shared with others (the pools it has mapped), open descriptors
    that are sockets and that are not, and mappings of pools."""

    private_bytes: int
    shared_bytes: int
    sockets: int
    files: int
    pools: int


class Processes:
    """Owns the processes of a run, by name, over all lives of each name; and the folder of their logs.

    A name lives from `start` to `kill`. Each process has a session of its own, by which it is found if it got away.
    """

    def __init__(self) -> None:
        self.lives: Counter[str] = Counter()
        """How often each name was started or killed: unchanged as long as it was one process all the time."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._frozen: set[str] = set()
        self._sessions: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="stress-")
        self.folder = Path(self._folder.name)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self, name: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Begins a life."""
        assert name not in self._running
        self.lives[name] += 1
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self._running[name] = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )
        self._sessions.add(process.pid)

    def kill(self, name: str) -> None:
        """kill -9, also of a frozen one, and reap."""
        self.lives[name] += 1
        self._frozen.discard(name)
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self._frozen.add(name)
        self._running[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT; of one that was killed meanwhile nothing is left to continue."""
        if name in self._frozen:
            self._frozen.remove(name)
            self._running[name].send_signal(signal.SIGCONT)

    def frozen(self, name: str) -> bool:
        """Whether it waits for a `thaw`."""
        return name in self._frozen

    def reap(self, name: str) -> int | None:
        """The status with which it ended by itself, which is then over with; None while it runs or after `kill`."""
        process = self._running.get(name)
        status = None if process is None else process.poll()
        if status is not None:
            self.lives[name] += 1
            del self._running[name]
        return status

    def log(self, name: str) -> str:
        """All that it wrote, in all its lives."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def footprint(self, name: str) -> Footprint:
        """What it takes now."""
        directory = Path("/proc") / str(self._running[name].pid)
        status = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines() if ":" in line)
        kib = {key: int(status[key].split()[0]) for key in ("RssAnon", "RssFile", "RssShmem")}
        sockets = files = 0
        for descriptor in (directory / "fd").iterdir():
            try:
                is_socket = os.readlink(descriptor).startswith("socket:")
            except OSError:
                continue  # closed meanwhile
            sockets += is_socket
            files += not is_socket
        return Footprint(
            private_bytes=1024 * (kib["RssAnon"] + kib["RssFile"]),
            shared_bytes=1024 * kib["RssShmem"],
            sockets=sockets,
            files=files,
            pools=(directory / "maps").read_text().count("memfd:kvstore-pool"),
        )

    def stop(self) -> dict[str, int]:
        """SIGTERM to all, SIGKILL to those who do not heed it; the exit statuses, -9 for these."""
        for name in list(self._frozen):
            self.thaw(name)
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + STOP_S
        statuses = {}
        for name, process in self._running.items():
            try:
                statuses[name] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        self._running.clear()
        return statuses

    def left(self) -> list[int]:
        """Processes of the sessions that were started which are still there, children of dead ones among them."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if fields[0] != "Z" and int(fields[3]) in self._sessions:
                found.append(int(stat.parent.name))
        return found

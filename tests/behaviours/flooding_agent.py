"""An agent that never stops talking, as a process of its own: `python flooding_agent.py KIND REPLICA MODEL SEED`.

Says on stdout where it listens, reports one block like any agent, and after a line on stdin floods the stream that it
has with valid messages, as fast as they are taken. At the end of stdin it says how many bytes were.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec
import report_support
from fetch_support import record
from report_support import removed, stored

from kvstore.identity import Namespace
from kvstore.messages import (
    Change,
    Cleared,
    Delta,
    Heartbeat,
    Hello,
    Report,
    Snapshot,
    Tier,
    encode_frame,
)

FIRST = 1 << 40


def beat(epoch: int, seq: int, key: int) -> Heartbeat:
    return report_support.beat(epoch, seq, (Tier.HBM, [key]))


def flood(kind: str, replica: str) -> Iterator[list[Report]]:
    """Messages without an end; every one of them is what an agent may say, and the digests are right."""
    if kind == "snapshots":
        for epoch in itertools.count(2):
            yield [Snapshot(epoch=epoch, seq=0, part=0, last=True, stored=[stored(FIRST)]), beat(epoch, 0, FIRST)]
    elif kind == "records":
        for number in itertools.count(1):
            yield [record(replica=replica)] if number % 500 else [beat(1, 0, FIRST)]
    elif kind == "heartbeats":
        yield from itertools.repeat([beat(1, 0, FIRST)])
    else:
        for number in itertools.count(1):
            yield [Delta(epoch=1, seq=number, changes=_changes(kind, number))]
            if number % 500 == 0:
                yield [beat(1, number, FIRST)]


def _changes(kind: str, number: int) -> list[Change]:
    """After an even number of deltas the first block is held, and no other."""
    match kind:
        case "nothing":
            return []
        case "one block":
            return [stored(FIRST + 1) if number % 2 else removed(FIRST + 1)]
        case "cleared":
            return [Cleared(tier=tier) for tier in Tier if tier is not Tier.HBM] * 3
        case "cleared again":
            return [Cleared(tier=Tier.HBM), stored(FIRST)]
        case "ever new blocks":
            keys = range(FIRST + 1_000 * number, FIRST + 1_000 * number + 1_000)
            return [stored(*keys), removed(*keys)]
    raise AssertionError(kind)


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


class Flood:
    """Answers one connection after the other on threads; `sent` counts the bytes of the flood."""

    def __init__(self, kind: str, replica: str, model: str, seed: int) -> None:
        self.kind, self.replica = kind, replica
        self.hello = Hello(
            replica_id=replica,
            epoch=1,
            engine="vllm",
            engine_version="0.32.0",
            engine_up=True,
            models=[model],
            block_size=16,
            capacity_blocks=100,
            geometry=None,
            identity_modes=["text"],
            route_seed_check=Namespace("").root(seed),
        )
        self.sent = 0
        self.begun = threading.Event()

    def serve(self, connection: socket.socket) -> None:
        asked = connection.makefile("rb")
        path = asked.readline().split()[1:2]
        while asked.readline().strip():
            pass
        ok = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
        if path == [b"/v1/hello"]:
            connection.sendall(ok + msgspec.json.encode(self.hello))
        elif path and path[0].startswith(b"/v1/reports"):
            opening = [Snapshot(epoch=1, seq=0, part=0, last=True, stored=[stored(FIRST)]), beat(1, 0, FIRST)]
            connection.sendall(ok + b"".join(map(encode_frame, opening)))
            while not self.begun.wait(0.1):
                connection.sendall(encode_frame(opening[1]))
            for reports in flood(self.kind, self.replica):
                self.sent += connection.send(b"".join(map(encode_frame, reports)))
        else:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        connection.close()

    def run(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            say(listener.getsockname()[1])
            threading.Thread(target=self._obey, daemon=True).start()
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def _obey(self) -> None:
        sys.stdin.readline()
        self.begun.set()
        sys.stdin.read()
        say(self.sent)
        os._exit(0)


if __name__ == "__main__":
    Flood(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])).run()

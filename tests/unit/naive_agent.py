"""The agent's end of the engine socket in a hundred lines: a dictionary for a pool, a thread for each connection.

Says what the real one must do for an engine, and misbehaves on request.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore import engine_messages as wire
from kvstore.board import BOARD_BYTES
from kvstore.errors import ProtocolError
from kvstore.namespace import unpack_content_keys
from kvstore.slot import pitch_of


class NaiveAgent:
    """A pool of `slots` slots that never evicts. Attributes may be changed at any time, and hold from the next verb on.

    `silent` verbs are never answered; `refusal` answers a hello, `welcome` changes fields of its answer; `pending` and
    `loading` are how many times a request is told so; `withheld` blocks are accepted and then not there.
    """

    def __init__(self, path: Path, slots: int = 256) -> None:
        self.path = path
        self.slots = slots
        self.silent: set[type] = set()
        self.refusal = ""
        self.welcome: dict[str, int] = {}
        self.pending = self.loading = self.withheld = 0
        self.deadline_s = 30.0
        self.hellos: list[wire.EngineHello] = []
        self.asked: list[wire.Question] = []
        self.held: dict[bytes, int] = {}
        self.working: dict[str, list[int]] = {}
        self.reserved: dict[int, bytes] = {}
        self.memory = mmap.mmap(-1, 1)
        self._told: Counter[str] = Counter()
        self._free = list(range(slots))
        self._fd = -1
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> NaiveAgent:
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()
        if self._fd >= 0:
            os.close(self._fd)

    def hang_up(self) -> None:
        """End all connections, as an agent that dies does; what they worked on is forgotten, what is held is not."""
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            self._connections.clear()
            self.working.clear()
            self.reserved.clear()

    def count(self, kind: type) -> int:
        """How often a verb was heard."""
        return sum(isinstance(each, kind) for each in self.asked)

    def block(self, key: bytes) -> bytes:
        """The bytes held under a key."""
        hello = self.hellos[0]
        start = self.held[key] * pitch_of(hello.block_bytes)
        return bytes(self.memory[start : start + hello.block_bytes])

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            try:
                self._greet(connection, wire.decode_hello(self._frame(reader)))
                while True:
                    question = wire.decode_question(self._frame(reader))
                    with self._lock:
                        self.asked.append(question)
                        if type(question) in self.silent:
                            continue
                        answer = self._answer(question)
                    connection.sendall(wire.encode(answer))
            except (OSError, EOFError, ProtocolError):
                return

    def _frame(self, reader: Any) -> bytes:
        header = reader.read(4)
        if len(header) < 4:
            raise EOFError
        return reader.read(wire.frame_length(header))

    def _greet(self, connection: socket.socket, hello: wire.EngineHello) -> None:
        self.hellos.append(hello)
        if wire.EngineHello in self.silent:
            self._stopped.wait()
            return
        if self.refusal:
            connection.sendall(wire.encode(wire.Refused(reason=self.refusal)))
            raise EOFError
        pitch = pitch_of(hello.block_bytes)
        if self._fd < 0:
            self._fd = os.memfd_create("pool")
            size = self.slots * pitch + BOARD_BYTES
            os.ftruncate(self._fd, size)
            self.memory = mmap.mmap(self._fd, size)
        welcome = {"slots": self.slots, "pitch": pitch, "block_bytes": hello.block_bytes} | self.welcome
        frame = wire.encode(wire.Welcome(**welcome))
        descriptors = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]).tobytes())
        connection.sendmsg([frame[:1]], [descriptors])
        connection.sendall(frame[1:])

    def _answer(self, question: wire.Question) -> wire.Answer:
        match question:
            case wire.Lookup():
                return wire.Found(blocks=len(self._run(question.keys)))
            case wire.Prepare():
                self._told.pop(question.request, None)
                if slots := self._run(question.keys):
                    self.working[question.request] = slots
                return self._progress(question.request)
            case wire.Poll():
                return self._progress(question.request)
            case wire.Release() | wire.Cancel():
                self.working.pop(question.request, None)
                return wire.Done()
            case wire.Reserve():
                slots = []
                for key in unpack_content_keys(question.keys):
                    known = key in self.held or key in self.reserved.values() or not self._free
                    slots.append(-1 if known else self._free.pop(0))
                    if not known:
                        self.reserved[slots[-1]] = key
                return wire.Reserved(slots=slots, generations=[1 if slot >= 0 else 0 for slot in slots])
            case wire.Commit():
                keys = unpack_content_keys(question.keys)
                visible = 0
                for key, slot, written in zip(keys, question.slots, question.written, strict=True):
                    assert self.reserved.pop(slot) == key
                    if written:
                        self.held[key] = slot
                        visible += 1
                return wire.Committed(blocks=visible)
            case wire.Clear():
                self.held.clear()
                return wire.Done()
            case wire.Observe() | wire.Failed():
                return wire.Done()

    def _run(self, keys: bytes) -> list[int]:
        slots = []
        for key in unpack_content_keys(keys):
            if key not in self.held:
                break
            slots.append(self.held[key])
        return slots

    def _progress(self, request: str) -> wire.Answer:
        """Pending, Accepted, Loading, Ready: as often as was asked for."""
        slots = self.working.get(request)
        if slots is None:
            return wire.Nothing(reason="missed")
        step = self._told[request]
        self._told[request] += 1
        if step < self.pending:
            return wire.Pending()
        if step == self.pending:
            return wire.Accepted(blocks=len(slots), deadline_s=self.deadline_s)
        if step <= self.pending + self.loading:
            return wire.Loading()
        ready = slots[: len(slots) - self.withheld]
        return wire.Ready(slots=ready, generations=[1] * len(ready))

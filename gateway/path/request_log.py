"""Writes down what was asked, for `prefix-gateway replay` (format: `gateway.replay.request_log`)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.errors import SettingsError
from gateway.identity.prompt import PromptIdentity
from gateway.path.exchange import Exchange

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""What may wait for the disk; what comes on top is not written."""


BLOCK_TOKENS = 512
"""Tokens of a block in a log: as coarse as a replay looks at prompts, so that a log stays small."""


class Hashed(msgspec.Struct, frozen=True, kw_only=True):
    """A request without its text. Each of `hash_ids` names the whole prompt up to the end of a block."""

    timestamp: float | str
    prompt_tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    block_tokens: int
    hash_ids: list[int]
    completion_tokens: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None


def block_ids(keys: Sequence[int], unit_tokens: int) -> array[int]:
    """Of a prompt's unit keys, which name whole prefixes, those that end a block."""
    step = BLOCK_TOKENS // unit_tokens
    return array("Q", keys[step - 1 :: step])


class _Entry(NamedTuple):
    at: float
    completion_tokens: int | None
    body: bytes
    identity: PromptIdentity


class RequestLog:
    """Appends a line for every request that had a prompt, whatever became of it.

    Owns the file, readable by its user alone, and the thread that writes it: `add` is called on the event loop and
    never waits. With `hashed` no text is written. A full disk or a slow one loses lines, which is logged, and no
    request. `close` writes what is left.
    """

    def __init__(self, path: Path, *, hashed: bool) -> None:
        """Raises SettingsError that names the flag where the file cannot be written."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--request-log {path}: {getattr(error, 'strerror', None) or error}") from error
        self._file = descriptor
        self._hashed = hashed
        self._entries: deque[_Entry] = deque()
        self._pending_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self.lost = 0
        self._writer = threading.Thread(target=self._write, name="request log", daemon=True)
        self._writer.start()

    def add(self, exchange: Exchange, at: float) -> None:
        """A request that arrived at `at` (Unix seconds) is over."""
        if exchange.identity is None or exchange.body is None or exchange.prompt is None:
            return
        completion = exchange.usage.completion_tokens if exchange.usage else None
        entry = _Entry(at, completion, b"" if self._hashed else exchange.body.raw, exchange.identity)
        with self._changed:
            size = _size(entry)
            if self._pending_bytes + size > MAX_PENDING_BYTES:
                self._lose("the disk is too slow")
                return
            self._pending_bytes += size
            self._entries.append(entry)
            self._changed.notify()

    def close(self) -> None:
        """Writes what waits, and closes the file. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._entries and not self._closing:
                    self._changed.wait()
                if not self._entries:
                    os.close(self._file)
                    return
                entries = list(self._entries)
                self._entries.clear()
            for entry in entries:
                self._append(entry)

    def _append(self, entry: _Entry) -> None:
        line = memoryview(_hashed_line(entry) if self._hashed else _body_line(entry))
        end = None
        try:
            end = os.fstat(self._file).st_size
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # part of a line would make the whole file unreadable
                if end is not None:
                    os.ftruncate(self._file, end)
            with self._changed:
                self._lose(str(error))
        finally:
            with self._changed:
                self._pending_bytes -= _size(entry)

    def _lose(self, why: str) -> None:
        """Counts a line that is not written; says so for the first, the second, the fourth, ..."""
        self.lost += 1
        if self.lost & (self.lost - 1) == 0:
            log.warning("request log: %d requests are not written: %s", self.lost, why)


def _size(entry: _Entry) -> int:
    return len(entry.body) + 8 * len(entry.identity.keys) + 256


def _body_line(entry: _Entry) -> bytes:
    # Outside of strings JSON's line breaks are white space, and inside of them they are escaped.
    body = entry.body.decode(errors="replace").replace("\n", " ").replace("\r", " ")
    tokens = "" if entry.completion_tokens is None else f',"completion_tokens":{entry.completion_tokens}'
    return f'{{"timestamp":{entry.at!r},"body":{body}{tokens}}}\n'.encode()


def _hashed_line(entry: _Entry) -> bytes:
    identity = entry.identity
    line = Hashed(
        timestamp=entry.at,
        prompt_tokens=max(1, identity.tokens),
        block_tokens=BLOCK_TOKENS,
        hash_ids=list(block_ids(identity.keys, identity.unit_tokens)),
        completion_tokens=entry.completion_tokens,
    )
    return msgspec.json.encode(line) + b"\n"

"""Reads traces: JSON lines, plain or gzipped, one request a line. The format is told by the fields of each line.

    Mooncake     timestamp (ms), input_length, output_length, hash_ids                           512 tokens a block
    Bailian      timestamp (s), chat_id, parent_chat_id, input_length, output_length, hash_ids    16 tokens a block
    native       t (s), in, out, r = [[first id, count], ...], optionally sid and gap (s)
    request log  timestamp and body; see `gateway.replay.request_log`

A line with "meta" may stand first and give the tokens of a block: {"meta": {"block": 64}}.
"""

from __future__ import annotations

import gzip
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.errors import TraceError
from gateway.path.request_log import BLOCK_TOKENS
from gateway.replay import request_log
from gateway.replay.rows import Row, Rows, Runs, Turn, block_count
from gateway.settings import field_first

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16

_MOST = 1 << 32
_Count = Annotated[int, Meta(ge=0, lt=_MOST)]
_Some = Annotated[int, Meta(ge=1, lt=_MOST)]
_Name = str | int
_Present = msgspec.Raw | UnsetType


class _Kind(msgspec.Struct):
    """Which format a line is in; only whether the fields are there counts."""

    meta: _Present = UNSET
    body: _Present = UNSET
    block_tokens: _Present = UNSET
    r: _Present = UNSET
    chat_id: _Present = UNSET
    hash_ids: _Present = UNSET


class _About(msgspec.Struct):
    block: _Some | None = None


class _Head(msgspec.Struct):
    meta: _About


class _Native(msgspec.Struct):
    t: float
    r: list[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], _Count]]
    tokens: _Some = msgspec.field(name="in")
    out: _Count | None = None
    sid: _Name | None = None
    gap: Annotated[float, Meta(ge=0)] | None = None


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: _Some
    hash_ids: list[int]
    output_length: _Count | None = None
    session_id: _Name | None = None


class _Bailian(msgspec.Struct):
    timestamp: float
    chat_id: _Name
    input_length: _Some
    hash_ids: list[int]
    parent_chat_id: _Name | None = None
    output_length: _Count | None = None


_kind = msgspec.json.Decoder(_Kind).decode
_head = msgspec.json.Decoder(_Head).decode
_native = msgspec.json.Decoder(_Native).decode
_mooncake = msgspec.json.Decoder(_Mooncake).decode
_bailian = msgspec.json.Decoder(_Bailian).decode


class _Fields(NamedTuple):
    """What a format calls a request's time and its blocks."""

    at: str
    ids: str


def read(paths: Sequence[Path]) -> Rows:
    """The requests of files that are parts of one workload, such as a rotated log, one after the other.

    Raises TraceError naming file, line and field, also where the files have different block sizes.
    """
    parts = [read_file(path) for path in paths]
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        if part.block != first.block:
            raise TraceError(f"{path}: blocks of {part.block} tokens, but {first.block} in {paths[0]}")
    return Rows(
        [row for part in parts for row in part.rows],
        first.block,
        all(part.live for part in parts),
        sum(part.assumed for part in parts),
    )


def read_file(path: Path) -> Rows:
    """The requests of one file, in its order. Raises TraceError naming file, line and field."""
    reader, number = _Reader(), 0
    try:
        for line in _lines(path):
            number += 1
            if not line.isspace():
                reader.add(line)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}:{number}: {field_first(str(error))}") from error
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    except (OSError, EOFError) as error:  # also what is no gzip, or only the beginning of one
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not reader.rows:
        raise TraceError(f"{path}: no requests")
    return Rows(reader.rows, reader.block or MOONCAKE_BLOCK, reader.live, reader.assumed)


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        yield from lines


class _Reader:
    """Gathers the rows of one file. What makes no sense is a ValueError that begins with the field."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.block = 0
        self.live = False
        self.assumed = 0

    def add(self, line: bytes) -> None:
        """One line."""
        kind = _kind(line)
        if kind.meta is not UNSET:
            if block := _head(line).meta.block:
                self._blocks_are(block, "meta.block")
        elif kind.body is not UNSET or kind.block_tokens is not UNSET:
            self._logged(line)
        elif kind.r is not UNSET:
            native = _native(line)
            ids = Runs(native.r)
            self._keep(_Fields("t", "r"), native.t, native.tokens, native.out, native.sid, ids, native.gap)
        elif kind.chat_id is not UNSET:
            self.block = self.block or BAILIAN_BLOCK
            turn = _bailian(line)
            chat = Turn(turn.chat_id, turn.parent_chat_id)
            self._hashed(turn, turn.timestamp, chat)
        elif kind.hash_ids is not UNSET:
            self.block = self.block or MOONCAKE_BLOCK
            found = _mooncake(line)
            self._hashed(found, found.timestamp / 1e3, found.session_id)
        else:
            raise ValueError("has none of the fields body (a request log), r and hash_ids (a trace)")

    def _logged(self, line: bytes) -> None:
        entry = request_log.read(line)
        self._blocks_are(BLOCK_TOKENS, "block_tokens")
        self.live = True
        self.assumed += entry.output is None
        output = request_log.ASSUMED_OUTPUT_TOKENS if entry.output is None else entry.output
        self._keep(_Fields("timestamp", "hash_ids"), entry.at, entry.tokens, output, None, entry.ids)

    def _hashed(self, found: _Mooncake | _Bailian, at: float, session: _Name | Turn | None) -> None:
        try:
            ids = array("Q", found.hash_ids)
        except OverflowError:
            raise ValueError("hash_ids: an id is below 0 or above 2**64 - 1") from None
        self._keep(_Fields("timestamp", "hash_ids"), at, found.input_length, found.output_length, session, ids)

    def _keep(
        self,
        fields: _Fields,
        at: float,
        tokens: int,
        output: int | None,
        session: _Name | Turn | None,
        ids: array[int] | Runs,
        gap_s: float | None = None,
    ) -> None:
        if not math.isfinite(at):
            raise ValueError(f"{fields.at}: {at} is not a time")
        block = self.block or MOONCAKE_BLOCK
        # A prompt cannot have more blocks; this also keeps one bad count from taking all memory.
        if (count := block_count(ids)) > -(-tokens // block):
            raise ValueError(f"{fields.ids}: {count} blocks of {block} tokens are more than a prompt of {tokens} has")
        self.rows.append(Row(at, tokens, max(1, output or 1), session, ids, gap_s))

    def _blocks_are(self, block: int, field: str) -> None:
        if self.block not in (0, block):
            raise ValueError(f"{field}: blocks of {block} tokens after some of {self.block}")
        self.block = block

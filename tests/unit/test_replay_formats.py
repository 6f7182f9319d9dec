"""Every format is read as it is specified, and what is wrong is told by file, line and field."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import TraceError
from gateway.replay.formats import read, read_file
from gateway.replay.rows import Runs, Turn, expand

MOONCAKE = {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 5, 9]}
BAILIAN = {
    "timestamp": 1.5,
    "chat_id": 7,
    "parent_chat_id": 3,
    "type": "text",
    "turn": 2,
    "input_length": 40,
    "output_length": 5,
    "hash_ids": [1, 2, 3],
}
NATIVE = {"t": 2.5, "gap": 1.0, "in": 200, "out": 9, "sid": "a", "r": [[4, 2], [90, 1]]}
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 5_000}], "max_tokens": 12}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncake(tmp_path: Path) -> None:
    rows = read_file(write(tmp_path / "t", MOONCAKE))
    assert (rows.block, rows.live) == (512, False)
    assert rows.rows == [(3.0, 1100, 7, None, array("Q", [0, 5, 9]), None)]


def test_bailian(tmp_path: Path) -> None:
    rows = read_file(write(tmp_path / "t", BAILIAN))
    assert rows.block == 16
    assert rows.rows[0].at == 1.5
    assert rows.rows[0].session == Turn(7, 3)


def test_native_with_its_block_size(tmp_path: Path) -> None:
    rows = read_file(write(tmp_path / "t", {"meta": {"block": 64, "source": "x"}}, NATIVE))
    assert rows.block == 64
    assert rows.rows == [(2.5, 200, 9, "a", Runs([(4, 2), (90, 1)]), 1.0)]
    assert list(expand(rows.rows[0].ids)) == [4, 5, 90]


def test_a_trace_may_leave_out_what_is_not_known(tmp_path: Path) -> None:
    rows = read_file(write(tmp_path / "t", {"t": 0, "in": 10, "r": []}, {"t": 1, "in": 10, "out": 0, "r": []}))
    assert [(row.output, row.session, row.gap_s) for row in rows.rows] == [(1, None, None)] * 2


def test_files_may_be_gzipped_have_empty_lines_and_be_parts_of_one(tmp_path: Path) -> None:
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() + b"\n\n"))
    plain = write(tmp_path / "b", MOONCAKE, MOONCAKE)
    assert len(read([packed, plain]).rows) == 3


def test_files_of_different_block_sizes_are_no_workload(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"b: blocks of 16 tokens, but 512 in .*a"):
        read([write(tmp_path / "a", MOONCAKE), write(tmp_path / "b", BAILIAN)])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (MOONCAKE | {"input_length": "x"}, "input_length: Expected `int`, got `str`"),
        (MOONCAKE | {"input_length": 0}, "input_length: "),
        (MOONCAKE | {"output_length": -1}, "output_length: "),
        (MOONCAKE | {"hash_ids": [1, -2]}, "hash_ids: an id"),
        (MOONCAKE | {"hash_ids": [1, "a"]}, "hash_ids[1]: "),
        (MOONCAKE | {"hash_ids": [1, 2, 3, 4]}, "hash_ids: 4 blocks of 512 tokens are more than a prompt of 1100 has"),
        ({key: MOONCAKE[key] for key in ("input_length", "hash_ids")}, "Object missing required field `timestamp`"),
        (BAILIAN | {"chat_id": None}, "chat_id: "),
        (NATIVE | {"r": [[0, 10**9]]}, "r: 1000000000 blocks"),
        (NATIVE | {"r": [[0]]}, "r[0]: "),
        (NATIVE | {"gap": -1}, "gap: "),
        (NATIVE | {"t": None}, "t: "),
        ({"meta": {"block": 0}}, "meta.block: "),
        ({"prompt": "x"}, "has none of the fields"),
        ([1], "Expected `object`, got `array`"),
        ({"timestamp": 1.0, "body": {"model": "m"}}, "body.prompt: "),
        ({"timestamp": 1.0, "body": 7}, "body: "),
        ({"timestamp": 1.0, "body": BODY | {"max_tokens": -1}}, "body.max_tokens: "),
        ({"timestamp": "noon", "body": BODY}, "timestamp: "),
        ({"body": BODY}, "Object missing required field `timestamp`"),
        ({"timestamp": 1, "prompt_tokens": 700, "block_tokens": 16, "hash_ids": [1]}, "block_tokens: expected 512"),
        ({"timestamp": 1, "prompt_tokens": 700, "block_tokens": 512, "hash_ids": [-1]}, "hash_ids: an id"),
        ({"timestamp": 1, "block_tokens": 512, "hash_ids": [1]}, "Object missing required field `prompt_tokens`"),
    ],
)
def test_what_is_wrong_is_told_by_file_line_and_field(line: Any, told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"t": 0, "in": 10, "r": []}, line)
    with pytest.raises(TraceError) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"{path}:2: {told}")


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: No such file"):
        read_file(tmp_path / "nowhere")
    (tmp_path / "half.gz").write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() * 1_000)[:-20])
    (tmp_path / "no.gz").write_bytes(b"plain")
    (tmp_path / "torn").write_text('{"t": 1, "in')
    (tmp_path / "empty").write_text("\n")
    for name, told in (("half.gz", "end-of-stream"), ("no.gz", "gzip"), ("torn", ":1: not JSON"), ("empty", "no req")):
        with pytest.raises(TraceError, match=told):
            read_file(tmp_path / name)


def test_a_request_log_of_bodies(tmp_path: Path) -> None:
    other = BODY | {"messages": [*BODY["messages"], {"role": "user", "content": "more"}]}  # type: ignore[misc]
    rows = read_file(
        write(
            tmp_path / "log",
            {"timestamp": 1_764_400_000.5, "body": BODY},
            {"timestamp": "2025-11-29T07:06:41Z", "body": json.dumps(other), "completion_tokens": 87},
            {
                "timestamp": 1_764_400_002,
                "body": {"model": "m", "prompt": "x" * 5_000},
                "usage": {"completion_tokens": 3},
            },
            {"timestamp": 1_764_400_003, "body": {"model": "m", "prompt": list(range(1_100))}},
        )
    )
    first, second, third, fourth = rows.rows
    assert (rows.block, rows.live, rows.assumed) == (512, True, 1)
    assert [first.at, second.at] == [1_764_400_000.5, 1_764_400_001.0]
    assert [row.output for row in rows.rows] == [12, 87, 3, 256]
    assert len(first.ids) == first.tokens // 512 == 2
    assert expand(second.ids)[:2] == first.ids, "the next turn continues the one before"
    assert set(expand(third.ids)).isdisjoint(expand(first.ids))
    assert (fourth.tokens, len(fourth.ids)) == (1_100, 2)


def test_a_request_log_without_text(tmp_path: Path) -> None:
    line = {"timestamp": 5, "prompt_tokens": 1_200, "block_tokens": 512, "hash_ids": [2**64 - 1, 7]}
    rows = read_file(write(tmp_path / "log", line, line | {"completion_tokens": 9}))
    assert [row.output for row in rows.rows] == [256, 9]
    assert rows.rows[0].ids == array("Q", [2**64 - 1, 7])

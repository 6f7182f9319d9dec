"""A request log loses no request: what cannot be written is counted, and the gateway goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from path_support import exchange, identity

from gateway.errors import SettingsError
from gateway.path import request_log
from gateway.path.body import Body
from gateway.path.exchange import Exchange
from gateway.path.request_log import RequestLog, block_ids

PROMPT = identity(range(1_300))


def made(body: bytes = b'{"model": "m", "messages": []}') -> Exchange:
    found = exchange(PROMPT)
    found.body = Body(body)
    return found


def test_a_line_holds_the_body_as_the_client_wrote_it(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", hashed=False)
    body = b'{\r\n "model": "m",\n "messages": [{"role": "user", "content": "a\\nb\xff\xc3\xa9"}]}'
    log.add(made(body), 12.5)
    log.close()
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line) == {
        "timestamp": 12.5,
        "body": {"model": "m", "messages": [{"role": "user", "content": "a\nb\ufffd\u00e9"}]},
    }


def test_a_hashed_line_names_prefixes_of_whole_blocks(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", hashed=True)
    log.add(made(), 12.5)
    log.close()
    line = json.loads((tmp_path / "log").read_text())
    assert line.pop("hash_ids") == [PROMPT.keys[31], PROMPT.keys[63]] == list(block_ids(PROMPT.keys, 16))
    assert line == {"timestamp": 12.5, "prompt_tokens": 1_300, "block_tokens": 512, "completion_tokens": None}


def test_what_has_no_prompt_is_not_written(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", hashed=False)
    log.add(exchange(None), 1.0)
    log.add(exchange(PROMPT), 1.0)
    log.close()
    assert (tmp_path / "log").read_bytes() == b""


def test_a_full_disk_costs_lines_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"), hashed=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.add(made(), 1.0)
        log.close()
    assert log.lost == 5
    assert [record.args[0] for record in caplog.records if record.args] == [1, 2, 4]  # type: ignore[index]


def test_a_file_that_is_gone_for_a_while_costs_lines_and_not_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that was restarted: not even the size of the file can be asked for."""
    log = RequestLog(tmp_path / "log", hashed=False)
    asked = threading.Event()

    def stale(descriptor: int) -> os.stat_result:
        asked.set()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as gone:
        gone.setattr(os, "fstat", stale)
        log.add(made(), 1.0)
        assert asked.wait(30)
    log.add(made(), 2.0)
    log.close()
    assert log.lost == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_what_waits_for_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING_BYTES", 10)
    log = RequestLog(tmp_path / "log", hashed=False)
    log.add(made(), 1.0)
    log.close()
    assert log.lost == 1 and (tmp_path / "log").read_bytes() == b""


def test_a_file_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--request-log .*: Is a directory"):
        RequestLog(tmp_path, hashed=False)
    flags = ["--port", "0", "--admin-port", "0", "--request-log", str(tmp_path / "no" / "log")]
    command = [sys.executable, "-m", "gateway", "serve", "--engine", "http://127.0.0.1:9", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"prefix-gateway: {' '.join(flags[-2:])}: No such file")

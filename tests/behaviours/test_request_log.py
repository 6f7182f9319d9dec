"""What `serve --request-log` writes, `replay` reads."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import httpx
import pytest
from http_support import MODEL, Call, FaultEngine, running_gateway

from gateway.replay.formats import read_file
from gateway.settings import TelemetrySettings

PATH = "/v1/chat/completions"


async def answer(call: Call) -> None:
    await call.chat()


def chat(*texts: str, **more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text} for text in texts], **more}


@pytest.mark.parametrize("hashed", [False, True])
async def test_every_prompt_is_written_and_can_be_replayed(tmp_path: Path, hashed: bool) -> None:
    log = tmp_path / "requests.jsonl"
    telemetry = TelemetrySettings(request_log=str(log), hash_prompts=hashed)
    first, second = "secret " * 400, "more " * 900
    async with FaultEngine(answer) as engine, running_gateway(engine, telemetry=telemetry) as running:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
            await http.post(PATH, json=chat(first))
            await http.post(PATH, content=json.dumps(chat(first, second, stream=True), indent=2))
            await http.post(PATH, content=b"{")
            await http.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert (b"secret" in log.read_bytes()) is not hashed
    rows = read_file(log)
    assert rows.live and not rows.assumed and [row.output for row in rows.rows] == [1, 1]
    one, two = rows.rows
    assert 0 < two.at - one.at < 60
    assert (len(one.ids), len(two.ids)) == (1, 3)
    assert list(two.ids)[:1] == list(one.ids)
    assert one.tokens == pytest.approx(len(first) / 4, rel=0.01)


async def test_a_log_is_continued_not_replaced(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    for _ in range(2):
        telemetry = TelemetrySettings(request_log=str(log))
        async with FaultEngine(answer) as engine, running_gateway(engine, telemetry=telemetry) as running:
            async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
                await http.post(PATH, json=chat("hello"))
    assert len(read_file(log).rows) == 2

"""An agent that never stops talking, with messages that are all valid, costs the others and their clients nothing but
time: requests are answered, other agents' reports come through, and what is not taken waits at the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_support import SEED
from claimed_cluster import BLOCK, Claimed, claimed_cluster, prompt
from flooding_agent import FIRST, flood
from http_support import eventually

from kvstore.messages import Delta, Report, Tier, encode_frame

BUFFERS = 32 << 20
"""More than two kernels' buffers and an event loop's hold."""


@contextlib.asynccontextmanager
async def flooding(kind: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """The process and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("flooding_agent.py")), kind, "bare", "b", str(SEED)),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def others_get_through(cluster: Claimed, documents: int) -> None:
    """Prompts are answered, reported by the other agent, and then predicted."""
    for document in range(documents):
        await cluster.ask(prompt(document), pin=0)
        await cluster.reported(0, 20 * (document + 1))
    for document in range(documents):
        receipt = await cluster.ask(prompt(document), pin=0)
        assert (receipt["reported_tokens"], receipt["cached_tokens"]) == (20 * BLOCK, 20 * BLOCK)


@pytest.mark.parametrize("kind", ["nothing", "one block", "cleared", "cleared again", "ever new blocks"])
async def test_endless_deltas_hold_nobody_up(kind: str) -> None:
    async with flooding(kind) as (url, process), claimed_cluster(bare="b", bare_agent=url) as cluster:
        assert process.stdin is not None and process.stdout is not None
        stream = cluster.gateway.fleet.streams["bare"]
        process.stdin.write(b"go\n")
        await eventually(lambda: stream._seq > 100, "it does not flood")
        before = stream._seq
        await others_get_through(cluster, 5)
        assert stream._seq > before, "and the flood went on all the time"
        assert stream.losses == cluster.gateway.fleet.streams["replica-0"].losses == {}
        process.stdin.close()
        sent = int(await process.stdout.readline())
        taken = stream._seq * len(_frame(kind))
        assert 0 < sent < taken + BUFFERS, "what is not taken waits where it came from"
        cluster.gateway.fleet._index.check()
        stream._turns.check()


@pytest.mark.parametrize("kind", ["heartbeats", "records", "snapshots"])
async def test_nor_does_anything_else_without_an_end(kind: str) -> None:
    async with flooding(kind) as (url, process), claimed_cluster(bare="b", bare_agent=url) as cluster:
        assert process.stdin is not None
        gateway, stream = cluster.gateway, cluster.gateway.fleet.streams["bare"]
        process.stdin.write(b"go\n")
        if kind == "snapshots":
            await eventually(lambda: stream.snapshots > 100, "it does not flood")
        before = stream.snapshots
        await others_get_through(cluster, 3)
        assert kind != "snapshots" or stream.snapshots > before, "and the flood went on all the time"
        assert stream.losses == gateway.fleet.streams["replica-0"].losses == {}
        assert set(gateway.fleet._index.keys_of("bare", Tier.HBM)) <= {FIRST}
        stream._turns.check()


def _frame(kind: str) -> bytes:
    """The shortest of its messages."""
    reports: list[Report] = [report for _, some in zip(range(2), flood(kind, "bare"), strict=False) for report in some]
    assert all(isinstance(report, Delta) for report in reports)
    return min(map(encode_frame, reports), key=len)

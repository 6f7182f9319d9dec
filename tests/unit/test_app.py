"""A gateway that can no longer watch its fleet does not go on as if it could."""

from __future__ import annotations

import asyncio

import pytest

from gateway.app import Gateway
from gateway.settings import ReplicaSettings, Settings


class Broken(Exception):
    pass


async def test_a_task_that_ends_is_told_and_raised(monkeypatch):
    gateway = Gateway(Settings(replicas=[ReplicaSettings(id="a", engine="http://127.0.0.1:9")]))

    async def fail() -> None:
        raise Broken

    monkeypatch.setattr(gateway.fleet, "run", fail)
    told = asyncio.Event()
    with pytest.raises(Broken):
        async with gateway.running(on_failure=told.set):
            await asyncio.wait_for(told.wait(), 10)


async def test_a_normal_end_raises_nothing():
    told = asyncio.Event()
    gateway = Gateway(Settings(replicas=[ReplicaSettings(id="a", engine="http://127.0.0.1:9")]))
    async with gateway.running(on_failure=told.set):
        pass
    await asyncio.sleep(0)
    assert not told.is_set()

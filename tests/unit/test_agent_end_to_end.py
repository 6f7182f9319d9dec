"""Agent and reference engine, each a process of its own: what is reported equals what the engine says it holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator

import httpx
import msgspec
from agent_support import SEED, Mirror, mirroring, until
from loopback_ports import free_port

from kvstore.identity import Namespace, token_keys
from kvstore.messages import Hello, ModelFiles

MODEL = "tiny"
START_DEADLINE_S = 120.0


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


class Engine:
    """The reference engine at fixed ports; `lineage` remembers the RouteKey of every block it ever showed."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.ports = [free_port() for _ in range(3)]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.lineage: dict[str, int] = {}
        self._client = client

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[asyncio.subprocess.Process]:
        http, events, replay = self.ports
        flags = {
            "--model": MODEL,
            "--served-model-name": MODEL,
            "--port": str(http),
            "--kv-tokens": "1024",
            "--threads": "1",
            "--kv-events-endpoint": f"tcp://127.0.0.1:{events}",
            "--kv-replay-endpoint": f"tcp://127.0.0.1:{replay}",
        }
        arguments = [text for pair in flags.items() for text in pair]
        async with process("replica_agent.reference", *arguments, "--debug") as started:
            deadline = time.monotonic() + START_DEADLINE_S
            while not await self._answers():
                assert started.returncode is None, "the engine ended at its start"
                assert time.monotonic() < deadline, "the engine did not start in time"
                await asyncio.sleep(0.1)
            yield started

    async def _answers(self) -> bool:
        try:
            return (await self._client.get(f"{self.url}/v1/models")).status_code == 200
        except httpx.HTTPError:
            return False

    async def chat(self, text: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 20, "temperature": 0}
        response = await self._client.post(f"{self.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text

    async def held(self) -> set[int]:
        """RouteKeys of what the engine holds, computed from its own account of tokens and parents."""
        blocks = (await self._client.get(f"{self.url}/debug/blocks")).json()["blocks"]
        root = Namespace(MODEL).root(SEED)
        pending = list(blocks)
        while pending:
            later = []
            for block in pending:
                start = root if block["parent"] is None else self.lineage.get(block["parent"])
                if start is None:
                    later.append(block)
                else:
                    (self.lineage[block["hash"]],) = token_keys(start, block["token_ids"])
            assert len(later) < len(pending), "a block's parent was never shown"
            pending = later
        return {self.lineage[block["hash"]] for block in blocks}


async def agree(engine: Engine, mirror: Mirror) -> set[int]:
    """Waits until reports and engine say the same; gives what."""
    held: set[int] = set()

    async def same() -> bool:
        nonlocal held
        held = await engine.held()
        return held == mirror.hbm

    await until(same, "reports equal the engine's blocks")
    return held


async def test_reports_equal_the_engines_blocks_through_its_lives() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        engine = Engine(client)
        async with engine.alive() as started, contextlib.AsyncExitStack() as stack:
            # What the engine did before its agent came is replayed.
            await engine.chat("The first words, spoken before anybody listened. " * 4)
            flags = {
                "--engine": engine.url,
                "--port": str(port),
                "--kv-events": f"tcp://127.0.0.1:{engine.ports[1]}",
                "--kv-replay": f"tcp://127.0.0.1:{engine.ports[2]}",
                "--route-seed": str(SEED),
            }
            await stack.enter_async_context(
                process("replica_agent", *(text for pair in flags.items() for text in pair))
            )

            async def introduced() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(f"{url}/v1/hello")).status_code == 200
                return False

            await until(introduced)
            hello = msgspec.json.decode((await client.get(f"{url}/v1/hello")).content, type=Hello)
            assert (hello.engine, hello.models, hello.block_size) == ("reference", [MODEL], 16)
            assert hello.capacity_blocks == 64
            assert hello.geometry is not None
            assert hello.identity_modes == ["exact", "text", "hash"]
            files = msgspec.msgpack.decode((await client.get(f"{url}/v1/model-files")).content, type=ModelFiles)
            assert files.tokenizer_json
            assert files.chat_template

            mirror = await stack.enter_async_context(mirroring(url))
            assert len(await agree(engine, mirror)) > 2
            await engine.chat("The first words, spoken before anybody listened. " * 5)
            await agree(engine, mirror)

            # More than the cache holds: blocks are evicted.
            for number in range(8):
                await engine.chat(f"Story {number}: " + f"once upon a time there were {number} replicas. " * 9)
            held = await agree(engine, mirror)
            assert 32 < len(held) <= 64

            assert (await client.post(f"{engine.url}/reset_prefix_cache")).status_code == 200
            await engine.chat("After the flood.")
            assert len(await agree(engine, mirror)) < 32

            await engine.chat("The last words of this life, which nobody must be credited with afterwards. " * 3)
            old = await agree(engine, mirror)
            before = mirror.epoch
            started.kill()
            killed = time.monotonic()
            await until(lambda: not mirror.hbm and mirror.heartbeat is not None and not mirror.heartbeat.engine_up)
            assert time.monotonic() - killed < 2.0
            keep = stack.pop_all()
        async with keep, engine.alive():
            await engine.chat("A new life begins with other words. " * 4)
            new = await agree(engine, mirror)
            await until(lambda: mirror.heartbeat is not None and mirror.heartbeat.engine_up)
            assert new
            assert not new & old
            assert mirror.epoch > before


def test_the_agent_knows_nothing_of_the_reference_engine() -> None:
    """The agent speaks to any engine over its wire formats; importing ours would pull torch into every sidecar."""
    code = (
        "import sys, replica_agent.__main__\n"
        "assert not [name for name in sys.modules if name.startswith(('torch', 'replica_agent.reference', 'gateway'))]"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0

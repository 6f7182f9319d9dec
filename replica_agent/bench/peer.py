"""A process that owns a pool and lets it be read over every transport: the other side of a benchmark, and of tests.

    python -m replica_agent.bench.peer SLOTS BLOCK_BYTES TRANSPORT,...

It talks JSON, a line each way: what it offers, and then an answer for each command. It ends with its standard input.
Every slot holds a block that verifies: `key_of` its number, in generation 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvstore.errors import TransferError
from kvstore.peer_messages import Offer
from kvstore.region import make_region
from kvstore.slot import pitch_of, seal
from kvstore.transfer.base import Grant, Region
from kvstore.transfer.select import make_transports, start_transports

HOST = "127.0.0.1"
LEASE = "lease"
SECRET = b"secret of a benchmark"
GENERATION = 1
START_S = 60.0


def key_of(slot: int) -> bytes:
    """The ContentKey of the block in a slot."""
    return hashlib.sha256(slot.to_bytes(8, "little")).digest()


def fill(region: Region, block_bytes: int, slots: Sequence[int], seed: int = 0) -> None:
    """Write blocks of random bytes, sealed, into these slots."""
    rng = random.Random(seed)
    for slot in slots:
        memory = region.memory[slot * region.pitch : (slot + 1) * region.pitch]
        memory[:block_bytes] = rng.randbytes(block_bytes)
        seal(memory, block_bytes, key_of(slot), GENERATION)


class Peer:
    """Owns such a process: starts it, asks it, freezes it, and kills it in the end."""

    def __init__(
        self, slots: int, block_bytes: int, transports: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = (str(slots), str(block_bytes), ",".join(transports))
        self._env = {**os.environ, **(env or {})}
        self._asking = asyncio.Lock()
        self._asked = 0
        self._process: asyncio.subprocess.Process | None = None
        self.offers: dict[str, Offer] = {}
        self.unavailable: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        """Raises RuntimeError when it does not come up."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._env,
            limit=1 << 20,
        )
        told = await self._read(START_S)
        self.offers = {name: Offer(transport=name, data=bytes.fromhex(data)) for name, data in told["offers"].items()}
        self.unavailable = told["unavailable"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def caller(self, transport: str) -> Callable[[bytes], Awaitable[bytes]]:
        """A `Plan.call` for this owner."""

        async def call(message: bytes) -> bytes:
            told = await self.ask(call=transport, message=message.hex())
            if "error" in told:
                raise TransferError(told["error"])
            return bytes.fromhex(told["answer"])

        return call

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Its answer. Raises TransferError when it is gone."""
        async with self._asking:
            assert self._process is not None and self._process.stdin is not None, "started"
            self._asked = number = self._asked + 1
            try:
                self._process.stdin.write(json.dumps({**command, "number": number}).encode() + b"\n")
                await self._process.stdin.drain()
                # Answers to those who no longer wait for them come first.
                while (told := await self._read(None))["number"] != number:
                    pass
                return told
            except (ConnectionError, RuntimeError) as error:
                raise TransferError(f"the owner is gone: {error}") from error

    @property
    def pid(self) -> int:
        """Whom to send signals."""
        assert self._process is not None, "started"
        return self._process.pid

    async def kill(self) -> int:
        """As a crash would. Returns its exit status."""
        assert self._process is not None, "started"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    async def _read(self, seconds: float | None) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None, "started"
        line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
        if not line:
            raise RuntimeError("the peer process ended")
        told: dict[str, Any] = json.loads(line)
        return told


async def _own(slots: int, block_bytes: int, names: list[str], out: int) -> None:
    region = make_region(slots, pitch_of(block_bytes))
    fill(region, block_bytes, range(slots))
    over = False

    def authorize(lease: str, secret: bytes) -> Grant | None:
        if over or (lease, secret) != (LEASE, SECRET):
            return None
        return Grant(lease, frozenset(range(slots)), time.monotonic() + START_S)

    def say(**answer: Any) -> None:
        os.write(out, json.dumps(answer).encode() + b"\n")

    transports, unavailable = await start_transports(make_transports(names, host=HOST), region, authorize)
    by_name = {each.name: each for each in transports}
    say(offers={name: each.offer().data.hex() for name, each in by_name.items()}, unavailable=unavailable)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        number = command["number"]
        if "call" in command:
            try:
                if (grant := authorize(LEASE, SECRET)) is None:
                    raise TransferError("no such lease")
                answer = await by_name[command["call"]].serve(grant, bytes.fromhex(command["message"]))
                say(number=number, answer=answer.hex())
            except TransferError as error:
                say(number=number, error=str(error))
        elif "over" in command:
            over = bool(command["over"])
            say(number=number)
        else:
            say(number=number, cpu_s=time.process_time())


def main() -> None:
    """Run the process."""
    # The protocol keeps standard output for itself: libraries that talk do it on the error stream.
    out = os.dup(1)
    os.dup2(2, 1)
    slots, block_bytes, names = sys.argv[1:4]
    asyncio.run(_own(int(slots), int(block_bytes), names.split(",") if names else [], out))
    # Transports are not closed: an owner that ends is an owner that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()

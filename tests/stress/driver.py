"""A seeded storm over a fleet: requests, clients that leave, frozen and killed parts, resets; and what must hold.

Every answer is the one of an engine that fetches nothing, and no request fails but by a kill; every part's own laws
hold while it is under load; afterwards nothing is held for anybody, and a replica that lived through it takes no more
of the machine than before.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import httpx
from stress.fleet import COUNT, TOKEN, Broken, Fleet
from stress.processes import Footprint, Processes
from stress.prompts import Oracle, Prompt, make_prompts

from kvstore.hint import Hint

CLIENTS = 8
FAMILIES, TAILS = 8, 5
WARM_S = 8.0
PATIENCE_S = 60.0
"""No answer may take longer, whatever is done to those who are not asked."""

LEAVES = 0.15
HINTED = 0.85
LONGEST_FREEZE_S = 2.0
FAULTS = {"freeze": 5, "reset": 2, "kill": 3}
QUIET_S = 30.0
"""Several times what holds and leases take to end."""

SAMPLE_S = 1.0
NOBODY = "http://127.0.0.1:1"

MORE_SOCKETS = 32
"""Connections between agents are kept open for a minute after they were used."""

MORE_FILES = 4
FORGET_S = 90.0
"""The pool of a dead peer is mapped for at most a minute more, and a little."""

MORE_BYTES = 16 * 2**20
SURVIVOR = 0
"""The replica whose parts are frozen but never killed, by which leaks are seen."""


@dataclass
class Report:
    """What a run did, for people and for the record. `survivor`: footprints of its parts before the storm, after it,
    and the median bytes of its own in each third of it."""

    seed: int
    seconds: float
    answers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    fetches: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    blocks_moved: int = 0
    cached_tokens: int = 0
    checks: int = 0
    quiet_after_s: float = 0.0
    survivor: dict[str, dict[str, Any]] = field(default_factory=dict)


class Driver:
    """Owns the report, and which replica last answered from which document; everything in it runs on one event loop.

    `run` raises Broken for the first thing that must not happen."""

    def __init__(self, processes: Processes, http: httpx.AsyncClient, *, seed: int, seconds: float) -> None:
        self.report = Report(seed, seconds)
        self._processes = processes
        self._fleet = Fleet(processes, http)
        self._http = http
        self._seed = seed
        self._prompts = make_prompts(seed, FAMILIES, TAILS)
        self._oracle = Oracle(http, self._fleet.oracle_url)
        self._holders: dict[int, deque[int]] = {family: deque([0], maxlen=3) for family in range(FAMILIES)}
        self._samples: dict[str, list[Footprint]] = {f"{kind}-{SURVIVOR}": [] for kind in ("engine", "agent")}
        self._recorded = [0.0] * COUNT
        self._requests = 0
        self._deaths: list[float] = []
        """When agents were killed."""

    async def run(self) -> Report:
        """Starts the fleet, warms it up, storms for the given time, and looks at what is left. Raises Broken."""
        await self._fleet.start_all()
        await self._phase(WARM_S)
        await self._quiet()
        before = self._footprints()
        await self._phase(self.report.seconds, self._chaos(), self._watch())
        self.report.quiet_after_s = await self._quiet()
        await self._collect(range(COUNT))
        self._judge(before)
        return self.report

    async def _phase(self, seconds: float, *meanwhile: Any) -> None:
        """The clients, and what happens to the parts meanwhile; a failure of one of them ends all."""
        self._over = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(self._client(random.Random(f"{self._seed} {seconds} {number}")))
                for work in meanwhile:
                    tasks.create_task(work)
                await asyncio.sleep(seconds)
                self._over.set()
        except ExceptionGroup as group:
            error: BaseException | None = group.subgroup(Broken)
            if error is None:
                raise
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _client(self, rng: random.Random) -> None:
        while not self._over.is_set():
            await self._request(rng, rng.choice(self._prompts), rng.randrange(COUNT))
            await asyncio.sleep(rng.expovariate(20.0))

    async def _request(self, rng: random.Random, prompt: Prompt, at: int) -> None:
        """One question, and what must be true of its answer."""
        expected = await self._oracle.answer(prompt)
        self._requests += 1
        request = f"r{self._requests}"
        body = prompt.body()
        if rng.random() < HINTED:
            body["kv_transfer_params"] = {"prefix_gateway": self._hint(rng, request, prompt, at)}
        leaves = rng.random() < LEAVES
        patience = rng.uniform(0.0, 0.5) if leaves else PATIENCE_S
        try:
            async with asyncio.timeout(patience):
                response = await self._fleet.ask(
                    f"engine-{at}", "POST", "/v1/completions", json=body, headers={"x-request-id": request}
                )
        except TimeoutError:
            if not leaves:
                raise Broken(f"{request}: engine-{at} has not answered within {PATIENCE_S} s") from None
            self.report.answers["left"] += 1
            return
        if response is None:
            self.report.answers["killed"] += 1
            await asyncio.sleep(0.1)
            return
        answer = response.json()
        text = answer["choices"][0]["text"]
        if text != expected:
            raise Broken(
                f"{request}: engine-{at} answers {text!r}, expected {expected!r}; {body | {'prompt': prompt.family}}"
            )
        self.report.answers["right"] += 1
        self.report.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self._holders[prompt.family].append(at)

    def _hint(self, rng: random.Random, request: str, prompt: Prompt, at: int) -> dict[str, Any]:
        """For the engine `at`: often true, sometimes outdated, exaggerated, out of reach, short of time or forged."""
        others = [each for each in self._holders[prompt.family] if each != at]
        source = rng.choice(others) if others and rng.random() < 0.9 else rng.randrange(COUNT)
        hint = Hint(
            request=request,
            source=f"replica-{source}",
            url=self._fleet.agent_url(source) if rng.random() < 0.97 else NOBODY,
            blocks=prompt.blocks if rng.random() < 0.7 else rng.randint(1, prompt.blocks + 8),
            deadline_ms=rng.choice((50, 500, 3_000, 3_000)),
        ).signed(TOKEN if rng.random() < 0.97 else "another secret")
        return {name: getattr(hint, name) for name in hint.__struct_fields__}

    async def _chaos(self) -> None:
        rng = random.Random(f"{self._seed} chaos")
        async with asyncio.TaskGroup() as tasks:
            while not self._over.is_set():
                await asyncio.sleep(rng.uniform(0.2, 2.0))
                fault = rng.choices([*FAULTS], [*FAULTS.values()])[0]
                if fault == "reset":
                    await self._fleet.ask(f"engine-{rng.randrange(COUNT)}", "POST", "/reset_prefix_cache")
                    self.report.faults["reset"] += 1
                    continue
                name = rng.choice(self._fleet.parts())
                seconds = rng.uniform(0.0, LONGEST_FREEZE_S)
                if self._fleet.life(name) is None or self._processes.frozen(name):
                    continue
                if fault == "kill" and not name.endswith(f"-{SURVIVOR}"):
                    await self._collect([int(name[-1])] if name.startswith("agent") else [])
                    self._fleet.kill(name)
                    if name.startswith("agent"):
                        self._deaths.append(time.monotonic())
                    tasks.create_task(self._revive(name, seconds))
                else:
                    fault = "freeze"
                    self._processes.freeze(name)
                    tasks.create_task(self._thaw(name, seconds))
                self.report.faults[f"{fault} {name[:-2]}"] += 1

    async def _revive(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._fleet.restart(name)

    async def _thaw(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._processes.thaw(name)

    async def _watch(self) -> None:
        """Looks at one part after the other, while all are under load."""
        turn = 0
        while not self._over.is_set():
            await asyncio.sleep(SAMPLE_S)
            self._fleet.raise_if_dead()
            for name, footprint in self._footprints().items():
                self._samples[name].append(footprint)
            parts = self._fleet.parts()
            turn += 1
            self.report.checks += await self._fleet.check(parts[turn % len(parts)]) is not None
            if turn % 10 == 0:
                await self._collect(range(COUNT))

    def _footprints(self) -> dict[str, Footprint]:
        return {name: self._processes.footprint(name) for name in self._samples}

    async def _collect(self, agents: Any) -> None:
        """Counts the records that came since the last look; an agent's are lost with its life."""
        for at in agents:
            records = [each for each in await self._fleet.fetches(at) if each["at"] > self._recorded[at]]
            self._recorded[at] = max((each["at"] for each in records), default=self._recorded[at])
            for each in records:
                self.report.fetches[f"{each['outcome']}: {each['reason']}"] += 1
                if each["reason"] == "abandoned":
                    raise Broken(f"agent-{at} had to give up what its engine never released: {each}")
                self.report.blocks_moved += each["moved"]
                if each["moved"]:
                    self.report.transports[each["transport"]] += 1

    async def _quiet(self) -> float:
        """Until nothing is held for anybody in any part; how long that took. Raises Broken when something stays."""
        began = time.monotonic()
        while True:
            busy = {}
            for name in self._fleet.parts():
                page = await self._fleet.check(name)
                assert page is not None, "nobody is killed any more"
                held = page.get("kv", page)
                kept = {what: count for what, count in held.items() if count and what in _MUST_END}
                if kept:
                    busy[name] = kept
            if not busy:
                return time.monotonic() - began
            if time.monotonic() > began + QUIET_S:
                raise Broken(f"held with nobody to hold it for: {busy}")
            await asyncio.sleep(0.2)

    def _judge(self, before: dict[str, Footprint]) -> None:
        """The survivor's parts against what they were."""
        for name, after in self._footprints().items():
            samples = [each.private_bytes for each in self._samples[name]]
            third = max(1, len(samples) // 3)
            thirds = [statistics.median(part) for part in (samples[:third], samples[third:-third], samples[-third:])]
            self.report.survivor[name] = {
                "before": before[name]._asdict(),
                "after": after._asdict(),
                "private_bytes_by_third": thirds,
            }
            mapped = COUNT + sum(died > time.monotonic() - FORGET_S for died in self._deaths)
            more = {
                "pools": after.pools - (mapped if name.startswith("agent") else 1),
                "sockets": after.sockets - before[name].sockets - MORE_SOCKETS,
                "files": after.files - before[name].files - MORE_FILES,
                "private_bytes": thirds[2] - thirds[1] - max(0.1 * thirds[1], MORE_BYTES),
            }
            leaked = [what for what, count in more.items() if count > 0]
            if leaked:
                raise Broken(f"{name} grows: {leaked}; {self.report.survivor[name]}")


_MUST_END = {
    # of an agent
    "reserved",
    "quarantined",
    "pinned",
    "leases",
    "searches",
    "fetches",
    "counters",
    "winding_down",
    "writing",
    # of an engine
    "running",
    "waiting",
    "used_blocks",
}


async def storm(seed: int, seconds: float) -> Report:
    """One whole run, from nothing to nothing. Raises Broken, naming the seed."""
    # An engine that was frozen ends the connections that have been idle meanwhile, and may do so to one on which a
    # request has just come: no fault of its own, so none is kept.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with Processes() as processes:
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=2 * PATIENCE_S) as http:
            driver = Driver(processes, http, seed=seed, seconds=seconds)
            try:
                report = await driver.run()
            except Broken as error:
                raise Broken(f"seed {seed}, {driver.report}\n{error}") from error
        _end(processes, seed)
    return report


def _end(processes: Processes, seed: int) -> None:
    """Stops every part; each says goodbye, and leaves nothing behind but its log, without a word of a defect in it."""
    statuses = processes.stop()
    wrong = {name: status for name, status in statuses.items() if status}
    left = [*processes.left(), *(path.name for path in processes.folder.glob("*.sock*"))]
    told = [
        f"{path.name}: {log[max(0, at - 500) : at + 3_000]}"
        for path in processes.folder.glob("*.log")
        for word in ("Traceback", "wrong bytes from")
        if (at := (log := path.read_text(errors="replace")).find(word)) >= 0
    ]
    if wrong or left or told:
        raise Broken(f"seed {seed}: exit statuses {wrong}, left behind {left}, logs:\n" + "\n".join(told))

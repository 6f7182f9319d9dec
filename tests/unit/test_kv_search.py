"""What one search decides, and what its record says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import ANY

import msgspec
import pytest
from agent_support import until
from kv_support import BLOCK_BYTES, BLOCK_TOKENS, agent, keys_of, pair

from kvstore.engine_messages import Accepted, Nothing, Pending, Prepare, Ready
from kvstore.messages import FetchOutcome
from kvstore.namespace import pack_content_keys
from kvstore.transfer.loopback import Network
from replica_agent.kv.fetches import MAX_FETCHES

TEN = keys_of(*range(10))


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"), [("off", FetchOutcome.DECLINED, "off"), ("shadow", FetchOutcome.SHADOW, "shadow")]
)
async def test_an_agent_that_does_not_act_leaves_a_record(
    tmp_path: Path, mode: str, outcome: FetchOutcome, reason: str
) -> None:
    network = Network()
    async with agent(tmp_path, network) as source, agent(tmp_path, network, fetch=mode) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)
        assert await reader.engine.prepare("r", TEN, source.hint(10)) == Nothing(reason=reason)
        record = reader.record
        assert (record.outcome, record.reason, record.asked, record.moved) == (outcome, reason, 0, 0)
        assert record.predicted_recompute_s > record.predicted_fetch_s > 0
        assert source.gate.seen == []
        state = reader.kv.fetch_state
        assert state is not None and not state.acts
        # Its own pool is used all the same.
        await reader.engine.save(TEN[:4])
        assert await reader.engine.load("s", TEN, source.hint(10)) == 4
        expected = FetchOutcome.SHADOW if mode == "shadow" else FetchOutcome.LOCAL
        assert (reader.records[-1].outcome, reader.records[-1].own) == (expected, 4)
        await reader.quiet()


async def test_what_computing_does_sooner_is_not_fetched(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        for _ in range(50):
            await reader.engine.ask(reader.engine.client.observe, 1_000, 500_500, 1e-4)
        assert await reader.engine.prepare("r", TEN, source.hint(10)) == Nothing(reason="cheaper_to_compute")
        assert reader.record.outcome is FetchOutcome.DECLINED
        assert reader.kv.prefill_tokens_per_s == pytest.approx(1e7, rel=0.5)
        # Nor is it even copied out of the own pool.
        await reader.engine.save(TEN)
        assert await reader.engine.prepare("s", TEN) == Nothing(reason="cheaper_to_compute")
        assert source.gate.seen == []
        await reader.quiet()


async def test_the_decision_is_taken_again_with_what_the_source_has(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN[:1])
        await reader.engine.prepare("r", TEN, source.hint(10))
        # One block is computed before three HTTP exchanges are over.
        assert await reader.engine.settled("r") == Nothing(reason="cheaper_to_compute")
        assert (reader.record.outcome, reader.record.asked) == (FetchOutcome.DECLINED, 0)
        await source.quiet()
        await reader.quiet()


async def test_only_this_deployments_hints_are_followed(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network, token="t") as source, agent(tmp_path, network, token="t") as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)
        good = source.hint(10)
        bad = [
            msgspec.structs.replace(good, mac=""),
            good.signed("other"),
            msgspec.structs.replace(good, blocks=11),
            msgspec.structs.replace(good, url="file:///etc/passwd").signed("t"),
            msgspec.structs.replace(good, blocks=0).signed("t"),
        ]
        for number, hint in enumerate(bad):
            assert await reader.engine.prepare(str(number), TEN, hint) == Nothing(reason="hint")
            assert reader.records[-1].outcome is FetchOutcome.REFUSED
        own = msgspec.structs.replace(good, source=reader.name).signed("t")
        assert await reader.engine.prepare("own", TEN, own) == Nothing(reason="own_hint")
        assert source.gate.seen == []
        assert await reader.engine.load("r", TEN, good) == 10
        await source.quiet()
        await reader.quiet()


async def test_a_hint_that_reaches_no_further_than_what_is_here(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        await reader.engine.save(TEN[:6])
        assert await reader.engine.load("r", TEN, source.hint(6)) == 6
        assert (reader.record.outcome, reader.record.own) == (FetchOutcome.LOCAL, 6)
        assert await reader.engine.prepare("s", TEN[6:], source.hint(6), cached=6) == Nothing(reason="not_held")
        assert reader.records[-1].outcome is FetchOutcome.MISSED
        assert source.gate.seen == []


async def test_what_the_engine_did_with_the_blocks_is_told(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(TEN)

        async def ready(request: str) -> None:
            assert isinstance(await engine.prepare(request, TEN), Accepted)
            assert isinstance(await engine.settled(request), Ready)

        await ready("some")
        await engine.ask(engine.client.failed, "some", 4)
        await engine.ask(engine.client.release, "some", 6, 0.5)
        await ready("none")
        await engine.ask(engine.client.release, "none", 0, 0.0)
        await ready("broken")
        await engine.ask(engine.client.failed, "broken", 10)
        await engine.ask(engine.client.release, "broken", 0, 0.0)
        await ready("more")
        await engine.ask(engine.client.release, "more", 11, 0.0)
        told = [(each.outcome.value, each.reason, each.loaded, each.failed, each.copy_s) for each in subject.records]
        assert told == [
            ("partial", "not_copied", 6, 4, 0.5),
            ("cancelled", "not_copied", 0, 0, 0.0),
            ("failed", "not_copied", 0, 10, 0.0),
            ("local", "complete", 10, 0, 0.0),
        ]
        await subject.quiet()


async def test_released_before_it_was_ready(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        network.faults.hold = asyncio.Event()
        await reader.engine.prepare("r", TEN, source.hint(10))
        await reader.engine.ask(reader.engine.client.release, "r", 0, 0.0)
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.CANCELLED, "not_ready")
        await source.quiet()
        await reader.quiet()


async def test_no_more_fetches_at_once_than_threads_can_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica_agent.kv.fetches.MAX_FETCHES", 1)
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        more = keys_of(*range(20, 30))
        await source.engine.save(TEN)
        await source.engine.save(more)
        network.faults.hold = asyncio.Event()
        await reader.engine.prepare("r", TEN, source.hint(10))
        await until(lambda: len(reader.kv.fetches) == 1)
        assert await reader.engine.prepare("s", more, source.hint(10)) == Nothing(reason="too_many")
        assert (reader.record.outcome, reader.record.asked) == (FetchOutcome.FAILED, 0)
        network.faults.hold.set()
        assert await reader.engine.load("r", TEN, source.hint(10)) == 10
        await source.quiet()
        await reader.quiet()


async def test_a_fetch_that_nobody_wants_before_it_has_begun_counts_no_more(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        kv = reader.kv
        (session,) = kv._sessions
        asked = Prepare(
            request="r",
            keys=pack_content_keys(TEN),
            cached_blocks=0,
            prompt_tokens=10 * BLOCK_TOKENS + 1,
            hint=source.hint(10),
        )
        for _ in range(MAX_FETCHES):
            # Both before the event loop has its next turn, as when another engine connects in the same one.
            kv.searches.prepare(session, session._around, asked, TEN, BLOCK_TOKENS)
            kv.searches.cancel("r")
        await until(lambda: kv.fetches.idle, "no fetch")
        assert await reader.engine.load("r", TEN, source.hint(10)) == 10
        await source.quiet()
        await reader.quiet()


async def test_nobody_waits_for_more_than_he_wants_longer_than_computing_takes(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        for _ in range(50):
            # So the ten blocks come in 10 seconds, and are computed in 16; the first one alone in 1.6.
            reader.kv.estimates.prefilled(1_000, 0, 100.0)
            reader.kv.estimates.fetched(source.name, 10 * BLOCK_BYTES, 10.0)
        network.faults.hold = asyncio.Event()
        await reader.engine.prepare("all", TEN, source.hint(10))
        await until(lambda: len(reader.kv.fetches) == 1)
        assert await reader.engine.prepare("first", TEN[:1]) == Nothing(reason="cheaper_to_compute")
        assert await reader.engine.prepare("too", TEN) in (Pending(), Accepted(blocks=10, deadline_s=ANY))
        network.faults.hold.set()
        assert await reader.engine.load("too", TEN) == 10
        assert await reader.engine.load("all", TEN, source.hint(10)) == 10
        await source.quiet()
        await reader.quiet()


async def test_one_who_joins_too_far_behind_computes_at_once(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        engine = reader.engine
        await source.engine.save(TEN[:6])
        source.gate.shut("/v1/leases")
        await engine.prepare("r", TEN, source.hint(10))
        await until(lambda: source.gate.reached == 1)
        # Nothing is decided: it may yet be that the source holds all ten.
        await engine.prepare("behind", TEN[8:], cached=8)
        await engine.prepare("within", TEN[3:8], cached=3)
        source.gate.open.set()
        assert await engine.settled("behind") == Nothing(reason="not_held")
        assert await engine.load("within", TEN[3:8], cached=3) == 3
        assert await engine.load("r", TEN, source.hint(10)) == 6
        await source.quiet()
        await reader.quiet()


async def test_the_prompt_is_what_the_engine_says(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        assert await reader.engine.load("r", TEN, source.hint(10), tokens=20 * BLOCK_TOKENS) == 10
        record = reader.record
        assert record.predicted_rest_s == pytest.approx(record.predicted_recompute_s / 2)

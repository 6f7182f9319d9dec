"""What goes wrong between two agents, and that nothing but time is lost by it: no wrong byte, no slot, no lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_support import until
from kv_support import BLOCK_BYTES, Agent, agent, both_quiet, key_of, keys_of, pair
from loopback_ports import free_port

from kvstore.cost import LinkEstimate
from kvstore.engine_messages import Loading, Nothing, Ready
from kvstore.fit import CHANGE
from kvstore.messages import FetchOutcome
from kvstore.slot import verify
from kvstore.transfer.loopback import Loopback, Network
from replica_agent.engines.errors import PoolRefused
from replica_agent.kv.link import FAILURES, HELD_BACK, HELD_BACK_S

TEN = keys_of(*range(10))


async def test_a_source_that_is_gone(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        hint = source.hint(10, url=f"http://127.0.0.1:{free_port()}")
        assert await reader.engine.load("r", TEN, hint) == 0
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.FAILED, "unreachable")
        await both_quiet(source, reader)


async def test_another_namespace_is_refused_and_not_asked_again(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network) as source, agent(tmp_path, network) as reader:
        await source.connect()
        await reader.connect(identity={"model": "m", "weights": "others"})
        await source.engine.save(TEN)
        for request in "rs":
            assert await reader.engine.load(request, TEN, source.hint(10)) == 0
        assert [(r.outcome, r.reason) for r in reader.records] == [(FetchOutcome.REFUSED, "namespace")] * 2
        assert source.gate.seen == ["/v1/leases"]
        await both_quiet(source, reader)


async def test_a_source_without_an_engine(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network) as source, agent(tmp_path, network) as reader:
        await reader.connect()
        assert await reader.engine.load("r", TEN, source.hint(10)) == 0
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.FAILED, "no_engine")
        await reader.quiet()


async def test_the_source_holds_nothing_or_less_than_it_was_said_to(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        assert await reader.engine.load("r", TEN, source.hint(10)) == 0
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.MISSED, "not_held")
        await source.engine.save(TEN[:6])
        assert await reader.engine.load("s", TEN, source.hint(10)) == 6
        record = reader.records[-1]
        assert (record.outcome, record.reason, record.asked, record.moved) == (FetchOutcome.PARTIAL, "not_held", 10, 6)
        await both_quiet(source, reader)


def flip(source: Agent, key: bytes) -> None:
    source.pool.view(source.slot_of(key))[BLOCK_BYTES - 1] ^= 1


def other_block(source: Agent, key: bytes) -> None:
    source.pool.view(source.slot_of(key))[:] = source.pool.view(source.slot_of(TEN[9]))


def other_generation(source: Agent, key: bytes) -> None:
    slot = source.pool.view(source.slot_of(key))
    slot[len(slot) - 64 + 40] ^= 1


def no_trailer(source: Agent, key: bytes) -> None:
    slot = source.pool.view(source.slot_of(key))
    slot[len(slot) - 64] ^= 1


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [(flip, "checksum"), (other_block, "key"), (other_generation, "generation"), (no_trailer, "trailer")],
)
@pytest.mark.parametrize("bad", [0, 4])
async def test_wrong_bytes_are_counted_and_the_blocks_before_them_kept(
    tmp_path: Path, spoil: Callable[[Agent, bytes], None], kind: str, bad: int
) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        spoil(source, TEN[bad])
        assert await reader.engine.load("r", TEN, source.hint(10)) == bad
        assert reader.record.reason == "wrong_bytes"
        assert reader.record.outcome is (FetchOutcome.PARTIAL if bad else FetchOutcome.FAILED)
        assert {k: n for k, n in reader.kv.wrong_bytes.items() if n} == {kind: 1}
        assert reader.pool.lookup(TEN) == bad
        await both_quiet(source, reader)


async def test_bytes_that_change_on_the_way(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        network.faults.corrupt = frozenset({7})
        assert await reader.engine.load("r", TEN, source.hint(10)) == 7
        assert reader.kv.wrong_bytes["checksum"] == 1
        await both_quiet(source, reader)


async def test_a_transfer_that_breaks_leaves_what_came(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        network.faults.stop_after = 4
        assert await reader.engine.load("r", TEN, source.hint(10)) == 4
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.PARTIAL, "broken")
        network.faults.stop_after = 0
        assert await reader.engine.load("s", TEN[4:], source.hint(10), cached=4) == 0
        assert (reader.records[-1].outcome, reader.records[-1].reason) == (FetchOutcome.FAILED, "broken")
        await both_quiet(source, reader)


async def hold_last(network: Network, reader: Agent, source: Agent) -> None:
    """A fetch of TEN that has moved all but the last block."""
    network.faults.hold, network.faults.hold_at = asyncio.Event(), 9
    await reader.engine.prepare("r", TEN, source.hint(10))
    await until(lambda: reader.pool.counts.reserved == 10, "the move")
    await until(lambda: moved(reader) == 9, "all but the last")


def moved(reader: Agent) -> int:
    """Blocks of TEN whose bytes are in the reader's memory, visible or not."""
    region = reader.pool.region
    everything = bytes(region.memory)
    return sum(everything.count(key) > 0 for key in TEN)


async def test_a_source_whose_fetches_fail_at_once_is_not_counted_on_for_a_while(tmp_path: Path) -> None:
    """No transport that both have, as where a port was taken."""
    later, apart, joined = 0.0, Network(), Network()

    def clock() -> float:
        return time.monotonic() + later

    async with agent(tmp_path, joined) as source, agent(tmp_path, apart, clock=clock) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)

        async def ends(request: str) -> tuple[FetchOutcome, str]:
            assert await reader.engine.load(request, TEN, source.hint(10)) == 0
            return reader.records[-1].outcome, reader.records[-1].reason

        def told() -> LinkEstimate | None:
            state = reader.kv.fetch_state
            assert state is not None and state.link.latency_s < 1
            return state.links.get(source.name)

        for request in range(FAILURES):
            assert told() is None
            assert await ends(f"r{request}") == (FetchOutcome.FAILED, "no_transport")
        await until(lambda: told() == HELD_BACK, "gateways are told")
        asked = len(source.gate.seen)
        assert await ends("s") == (FetchOutcome.DECLINED, "source_fails")
        later += HELD_BACK_S
        assert told() is None and len(source.gate.seen) == asked
        assert await ends("t") == (FetchOutcome.FAILED, "no_transport")
        await until(lambda: told() == HELD_BACK, "gateways are told")
        later += HELD_BACK_S
        way = Loopback(joined)
        assert reader.kv.keeper.leases is not None
        await way.start(reader.pool.region, reader.kv.keeper.leases.authorize)
        reader.kv.keeper.transports[:] = [way]
        assert await reader.engine.load("u", TEN, source.hint(10)) == 10
        await until(lambda: (link := told()) is not None and link.latency_s < 60, "it is counted on again")
        await both_quiet(source, reader)


async def test_a_lease_that_did_not_hold_is_not_believed(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        await hold_last(network, reader, source)
        await source.engine.ask(source.engine.client.clear)
        assert network.faults.hold is not None
        network.faults.hold.set()
        assert await reader.engine.settled("r") == Nothing(reason="lease_not_held")
        assert reader.record.outcome is FetchOutcome.FAILED
        assert reader.kv.wrong_bytes["lease"] == 1
        assert reader.pool.lookup(TEN) == 0
        await both_quiet(source, reader)


async def test_an_owner_that_restarts_knows_nothing_of_the_lease(tmp_path: Path) -> None:
    network, port = Network(), free_port()
    async with agent(tmp_path, network) as reader:
        await reader.connect()
        async with agent(tmp_path, network, port=port) as source:
            await source.connect()
            await source.engine.save(TEN)
            await hold_last(network, reader, source)
        async with agent(tmp_path, network, port=port) as again:
            await again.connect()
            assert network.faults.hold is not None
            network.faults.hold.set()
            assert await reader.engine.settled("r") == Nothing(reason="lease_not_held")
            await both_quiet(again, reader)


async def test_an_owner_that_dies_before_it_confirms(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network) as reader:
        await reader.connect()
        async with agent(tmp_path, network) as source:
            await source.connect()
            await source.engine.save(TEN)
            await hold_last(network, reader, source)
        assert network.faults.hold is not None
        network.faults.hold.set()
        assert await reader.engine.settled("r") == Nothing(reason="unreachable")
        assert reader.pool.lookup(TEN) == 0
        await reader.quiet()


async def test_past_its_deadline_a_fetch_ends_and_a_late_write_hits_nothing(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        network.faults.hold, network.faults.hold_at, network.faults.late = asyncio.Event(), 4, True
        assert await reader.engine.load("r", TEN, source.hint(10, deadline_ms=600)) == 4
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.PARTIAL, "deadline")
        assert reader.pool.counts.quarantined == 6
        # While their slots are in quarantine, other blocks are saved; then what was late lands.
        others = keys_of(*range(100, 154))
        assert await reader.engine.save(others) == 54
        assert network.land() == 6
        for key in (*TEN[:4], *others):
            slot = reader.slot_of(key)
            (held,) = reader.pool.pin([key])
            reader.pool.unpin([held])
            verify(reader.pool.view(slot), BLOCK_BYTES, key, held.generation)
        await both_quiet(source, reader)


async def test_a_deadline_without_a_block_is_late(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        network.faults.hold = asyncio.Event()
        before = reader.kv.estimates.link.seconds(BLOCK_BYTES)
        for request in range(CHANGE):
            assert await reader.engine.load(f"r{request}", TEN, source.hint(10, deadline_ms=600)) == 0
            assert (reader.records[-1].outcome, reader.records[-1].reason) == (FetchOutcome.LATE, "deadline")
        await both_quiet(source, reader)
        assert reader.kv.estimates.link.seconds(BLOCK_BYTES) > before


async def test_an_owner_that_nothing_gets_through_to_is_found_slow(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        before = reader.kv.estimates.link.seconds(BLOCK_BYTES)
        for request in map(str, range(CHANGE)):
            network.faults.hold, network.faults.stop_after = asyncio.Event(), 0
            await reader.engine.prepare(request, TEN, source.hint(10))
            until_then = time.monotonic() + 0.1
            await until(lambda then=until_then: time.monotonic() > then, "as long as nothing gets through")  # type: ignore[misc]
            network.faults.hold.set()
            assert await reader.engine.settled(request) == Nothing(reason="broken")
            assert reader.records[-1].outcome is FetchOutcome.FAILED
        await both_quiet(source, reader)
        assert reader.kv.estimates.link.seconds(BLOCK_BYTES) > before


async def test_what_a_deadline_cuts_short_teaches_what_all_would_have_taken(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        for seed in range(3):
            keys = keys_of(*range(seed * 10, seed * 10 + 10))
            await source.engine.save(keys)
            network.faults.hold, network.faults.hold_at = asyncio.Event(), 2
            assert await reader.engine.load(f"r{seed}", keys, source.hint(10, deadline_ms=400)) == 2
        await both_quiet(source, reader)
        link = reader.kv.estimates.links[source.name]
        # Two came in 0.3 seconds, so ten would have taken 1.6.
        assert link.seconds(10 * BLOCK_BYTES) > 1.2


async def test_an_owner_that_confirms_too_late_is_late_whoever_notices_first(tmp_path: Path) -> None:
    async with pair(tmp_path, Network()) as (source, reader):
        await source.engine.save(TEN)
        before = reader.kv.estimates.link.seconds(BLOCK_BYTES)
        for request in range(CHANGE):
            source.gate.shut("/release")
            assert await reader.engine.load(f"r{request}", TEN, source.hint(10, deadline_ms=600)) == 0
            assert (reader.records[-1].outcome, reader.records[-1].reason) == (FetchOutcome.LATE, "deadline")
            source.gate.open.set()
            await both_quiet(source, reader)
        assert reader.kv.estimates.link.seconds(BLOCK_BYTES) > before


@pytest.mark.parametrize("after", [False, True], ids=["asked", "granted"])
async def test_a_lease_that_comes_too_late_is_given_back(tmp_path: Path, after: bool) -> None:
    network = Network()
    async with agent(tmp_path, network) as source, agent(tmp_path, network, lease_s=0.05) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)
        source.gate.shut("/v1/leases", after=after)
        await reader.engine.prepare("r", TEN, source.hint(10))
        assert await reader.engine.settled("r") == Nothing(reason="timeout")
        assert source.gate.reached == 1
        source.gate.open.set()
        await until(lambda: any(path.endswith("/release") for path in source.gate.seen), "given back")
        await both_quiet(source, reader)


@pytest.mark.parametrize("step", ["asked", "granted", "moving", "confirming", "confirmed", "ready"])
async def test_cancelled_at_each_step_nothing_is_left(tmp_path: Path, step: str) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        await source.engine.save(TEN)
        gate, engine = source.gate, reader.engine
        if step in ("asked", "granted"):
            gate.shut("/v1/leases", after=step == "granted")
        elif step in ("confirming", "confirmed"):
            gate.shut("/release", after=step == "confirmed")
        elif step == "moving":
            network.faults.hold, network.faults.hold_at = asyncio.Event(), 5
        await engine.prepare("r", TEN, source.hint(10))
        if step == "ready":
            assert isinstance(await engine.settled("r"), Ready)
        elif step == "moving":
            await until(lambda: moved(reader) == 5, "half of it")
        else:
            await until(lambda: gate.reached == 1, step)
        await engine.ask(engine.client.cancel, "r")
        await engine.ask(engine.client.cancel, "r")
        assert await engine.poll("r") == Nothing(reason="unknown")
        assert (reader.record.outcome, reader.record.loaded) == (FetchOutcome.CANCELLED, 0)
        gate.open.set()
        await both_quiet(source, reader)
        # Whatever was reserved is free again, so that the same blocks can be had.
        network.faults.hold = None
        assert await engine.load("s", TEN, source.hint(10)) == 10


async def test_clearing_the_engine_ends_what_is_on_its_way(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        engine = reader.engine
        await source.engine.save(TEN)
        await engine.save(TEN[:3])
        assert await engine.load("own", TEN[:3]) == 3
        await engine.prepare("ready", TEN[:3])
        network.faults.hold, network.faults.hold_at = asyncio.Event(), 3
        await engine.prepare("r", TEN, source.hint(10))
        await until(lambda: reader.pool.counts.reserved == 7)
        await engine.ask(engine.client.clear)
        for request in ("ready", "r"):
            assert await engine.settled(request) == Nothing(reason="cleared")
        assert reader.pool.lookup(TEN) == 0
        await both_quiet(source, reader)


async def test_a_long_transfer_renews_its_lease(tmp_path: Path) -> None:
    network = Network()
    flags = {"lease-ttl": "1.5"}
    async with agent(tmp_path, network, **flags) as source, agent(tmp_path, network, **flags) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)
        network.faults.hold = asyncio.Event()
        await reader.engine.prepare("r", TEN, source.hint(10))
        await until(lambda: sum(path.endswith("/renew") for path in source.gate.seen) >= 3, "renewals")
        network.faults.hold.set()
        assert isinstance(await reader.engine.settled("r"), Ready)
        await reader.engine.ask(reader.engine.client.release, "r", 10, 0.001)
        # An owner that does not renew is not waited for.
        network.faults.hold.clear()
        more = keys_of(*range(20, 30))
        await source.engine.save(more)
        await reader.engine.prepare("s", more, source.hint(10))
        await until(lambda: len(source.kv.keeper.leases or ()) == 1, "leased")
        source.gate.shut("/renew")
        assert await reader.engine.settled("s") == Nothing(reason="timeout")
        source.gate.open.set()
        await both_quiet(source, reader)


async def test_a_full_pool_fetches_what_fits(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network) as source, agent(tmp_path, network, **{"pool-bytes": "65536"}) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(TEN)
        mine = keys_of(*range(50, 55))
        await reader.engine.save(mine)
        await reader.engine.prepare("mine", mine)
        assert isinstance(await reader.engine.settled("mine"), Ready)
        # Eight slots, of which five are pinned.
        assert await reader.engine.load("r", TEN, source.hint(10)) == 3
        assert (reader.record.outcome, reader.record.reason) == (FetchOutcome.PARTIAL, "no_room")
        assert reader.pool.lookup(mine) == 5
        await reader.engine.ask(reader.engine.client.cancel, "mine")
        await both_quiet(source, reader)


async def test_what_was_lent_goes_first(tmp_path: Path) -> None:
    network = Network()
    async with agent(tmp_path, network, **{"pool-bytes": "65536"}) as source, agent(tmp_path, network) as reader:
        await source.connect()
        await reader.connect()
        await source.engine.save(keys_of(1, 2, 3))
        await source.engine.save(keys_of(4, 5, 6, 7))
        assert await reader.engine.load("r", keys_of(4, 5, 6, 7), source.hint(4)) == 4
        await source.quiet()
        await source.engine.save(keys_of(*range(10, 15)))
        assert (source.pool.lookup(keys_of(1, 2, 3)), source.pool.lookup(keys_of(4))) == (3, 0)


async def test_an_engine_that_dies_while_it_reads_and_writes(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(TEN)
        await engine.prepare("r", TEN)
        assert isinstance(await engine.settled("r"), Ready)
        await engine.ask(engine.client.reserve, keys_of(20, 21), b"")
        await engine.close()
        await until(lambda: not subject.kv.engine_connected)
        counts = subject.pool.counts
        assert (counts.quarantined, counts.pinned, counts.reserved) == (2, 10, 0)
        await subject.quiet()
        # The next life finds what was saved, and nothing that was being written.
        again = await subject.connect(engine_id="life-2")
        assert await again.load("r", TEN) == 10
        assert await again.ask(again.client.lookup, "r", keys_of(20)) == 0


async def test_a_new_life_takes_over_from_one_that_hangs(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        old = await subject.connect()
        await old.save(TEN)
        reserved = await old.ask(old.client.reserve, keys_of(20), b"")
        new = await subject.connect(engine_id="life-2")
        await until(lambda: not old.client.alive(), "hung up")
        assert await new.load("r", TEN) == 10
        # What the old one wrote is nobody's, whoever claims it.
        assert reserved[0] is not None
        assert await new.commit([(key_of(20), reserved[0])]) == 0
        await subject.quiet()


async def test_two_engines_on_one_socket_do_not_take_turns(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        await subject.connect(engine_id="life-1")
        new = await subject.connect(engine_id="life-2")
        with pytest.raises(PoolRefused, match="engine_id: another engine"):
            await subject.connect(engine_id="life-1")
        assert new.client.alive()
        # Once it has gone, the place is free.
        await new.close()
        await until(lambda: not subject.kv.engine_connected, "gone")
        old = await subject.connect(engine_id="life-1")
        assert await old.save(TEN) == 10


async def test_other_weights_find_an_empty_pool(tmp_path: Path) -> None:
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(TEN)
        other = await subject.connect(engine_id="life-2", identity={"model": "m", "weights": "others"})
        assert await other.ask(other.client.lookup, "r", TEN) == 0
        await subject.quiet()


async def test_an_agent_that_restarts(tmp_path: Path) -> None:
    network = Network()
    flags = {"replica-id": "same"}
    async with pair(tmp_path, network) as (source, _):
        await source.engine.save(TEN)
        async with agent(tmp_path, network, **flags) as first:
            await first.connect()
            network.faults.hold = asyncio.Event()
            await first.engine.prepare("r", TEN, source.hint(10))
            await until(lambda: first.pool.counts.reserved == 10)
        network.faults.hold = None
        async with agent(tmp_path, network, **flags) as second:
            await second.connect()
            assert await second.engine.load("r", TEN, source.hint(10)) == 10
            await both_quiet(source, second)


async def test_an_engine_that_never_asks_again_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica_agent.kv.searches.GRACE_S", -10.0)
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        await engine.save(TEN)
        await engine.prepare("r", TEN)
        await until(lambda: len(subject.kv.searches) == 0, "forgotten")
        assert (subject.record.outcome, subject.record.reason) == (FetchOutcome.CANCELLED, "abandoned")
        await subject.quiet()


async def test_slots_that_are_never_written_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica_agent.kv.engine_session.WRITE_S", -1.0)
    async with agent(tmp_path, Network()) as subject:
        engine = await subject.connect()
        reserved = await engine.ask(engine.client.reserve, TEN, b"")
        await until(lambda: subject.pool.counts.reserved == 0, "taken back")
        assert await engine.commit([(key, place) for key, place in zip(TEN, reserved, strict=True) if place]) == 0
        await subject.quiet()


async def test_a_repeated_question_begins_nothing_new(tmp_path: Path) -> None:
    network = Network()
    async with pair(tmp_path, network) as (source, reader):
        engine = reader.engine
        await source.engine.save(TEN)
        network.faults.hold = asyncio.Event()
        hint = source.hint(10)
        await engine.prepare("r", TEN, hint)
        await until(lambda: reader.pool.counts.reserved == 10)
        await engine.prepare("r", TEN, hint)

        async def loading() -> bool:
            return isinstance(await engine.poll("r"), Loading)

        await until(loading)
        assert source.gate.seen == ["/v1/leases"]
        # Other blocks under the same name: the first search is over.
        assert await engine.prepare("r", TEN[:1]) == Nothing(reason="not_held")
        assert reader.record.outcome is FetchOutcome.CANCELLED
        await engine.ask(engine.client.release, "never heard of", 1, 0.1)
        await engine.ask(engine.client.failed, "never heard of", 1)
        await both_quiet(source, reader)

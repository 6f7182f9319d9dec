"""The subscriber against a real publisher over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from agent_support import Publisher, removed, stored, tokens_of, until
from loopback_ports import free_port

from replica_agent.events import subscriber as subscriber_module
from replica_agent.events.decode import BlockRemoved, BlockStored, EventBatch
from replica_agent.events.subscriber import KvEventSubscriber


class Held:
    """A sink that keeps the hashes held, and why it was emptied."""

    def __init__(self) -> None:
        self.hashes: list[int | bytes] = []
        self.restarts: list[str] = []

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.hashes += event.hashes
            elif isinstance(event, BlockRemoved):
                for engine_hash in event.hashes:
                    self.hashes.remove(engine_hash)

    def restart(self, reason: str) -> None:
        self.hashes.clear()
        self.restarts.append(reason)


class Rig:
    """Ports that stay the same over the lives of an engine."""

    def __init__(self) -> None:
        self.events_port = free_port()
        self.replay_port = free_port()
        self.publishers: list[Publisher] = []

    def engine(self, **more: object) -> Publisher:
        options = {"replay_port": self.replay_port} | more
        self.publishers.append(Publisher(self.events_port, **options))  # type: ignore[arg-type]
        return self.publishers[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for publisher in rig.publishers:
        publisher.close()


@contextlib.asynccontextmanager
async def subscribed(rig: Rig, *, replay: bool = True, **more: float) -> AsyncIterator[tuple[Held, KvEventSubscriber]]:
    held = Held()
    subscriber = KvEventSubscriber(
        held,
        f"tcp://127.0.0.1:{rig.events_port}",
        f"tcp://127.0.0.1:{rig.replay_port}" if replay else None,
        **({"quiet_s": 0.1} | more),  # type: ignore[arg-type]
    )
    task = asyncio.create_task(subscriber.run())
    subscriber.resume()
    try:
        yield held, subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def block(number: int) -> dict[str, object]:
    return stored([number], tokens_of(number))


@pytest.mark.parametrize("topic_in_replies", [True, False])
async def test_what_was_published_before_is_replayed(rig: Rig, topic_in_replies: bool) -> None:
    publisher = rig.engine(topic_in_replies=topic_in_replies)
    for number in range(100):
        publisher.publish(block(number))
    async with subscribed(rig) as (held, subscriber):
        await until(lambda: held.hashes == list(range(100)))
        publisher.publish(block(100), removed(0))
        await until(lambda: held.hashes == list(range(1, 101)))
        assert (held.restarts, subscriber.gaps) == ([], 0)


async def test_a_batch_lost_in_the_middle_is_replayed(rig: Rig) -> None:
    publisher = rig.engine()
    publisher.publish(block(0))
    async with subscribed(rig, quiet_s=60) as (held, subscriber):
        await until(lambda: held.hashes == [0] and not subscriber.syncing)
        publisher.publish(block(1), lose=True)
        publisher.publish(block(2))
        await until(lambda: held.hashes == [0, 1, 2])
        assert (held.restarts, subscriber.gaps) == ([], 1)


async def test_the_last_batch_lost_is_fetched_when_it_is_quiet(rig: Rig) -> None:
    publisher = rig.engine()
    async with subscribed(rig) as (held, subscriber):
        await until(lambda: subscriber.connected and not subscriber.syncing)
        publisher.publish(block(0))
        publisher.publish(removed(0), lose=True)
        publisher.publish(block(1), lose=True)
        await until(lambda: held.hashes == [1])
        assert held.restarts == []


async def test_a_quiet_engine_is_asked_once(rig: Rig) -> None:
    publisher = rig.engine()
    publisher.publish(block(0))
    async with subscribed(rig, quiet_s=0.02) as (held, _):
        await until(lambda: len(publisher.replays) == 2)
        publisher.publish(block(1))
        await until(lambda: held.hashes == [0, 1] and len(publisher.replays) == 3)
        assert publisher.replays == [0, 1, 2]


async def test_a_malformed_batch_empties_and_nothing_more(rig: Rig) -> None:
    publisher = rig.engine()
    async with subscribed(rig) as (held, subscriber):
        publisher.publish(block(0))
        await until(lambda: held.hashes == [0])
        publisher.publish(raw=b"\xc1 not msgpack")
        publisher.publish(block(1))
        await until(lambda: held.hashes == [1])
        assert (held.restarts, subscriber.counts.malformed) == (["malformed"], 1)


async def test_a_message_without_an_end_costs_a_resync(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's connection is ended, and the subscription begins anew."""
    monkeypatch.setattr(subscriber_module, "MAX_MESSAGE_BYTES", 10_000)
    publisher = rig.engine()
    async with subscribed(rig, reply_deadline_s=0.2) as (held, subscriber):
        publisher.publish(block(0))
        await until(lambda: held.hashes == [0])
        publisher.publish(raw=bytes(20_000))
        await until(lambda: "disconnected" in held.restarts)
        await until(lambda: subscriber.connected and not subscriber.syncing)
        held.hashes.clear()
        await _publish_until_seen(publisher, held)
        assert set(held.hashes) == {-1}


async def test_another_rank_is_not_this_one(rig: Rig) -> None:
    publisher = rig.engine(rank=1)
    publisher.publish(block(0))
    async with subscribed(rig) as (held, subscriber):
        await until(lambda: subscriber.counts.other_rank == 1)
        assert held.hashes == []


@pytest.mark.parametrize("first_seq", [0, 3, 4, 900])
@pytest.mark.parametrize("replay", [True, False])
async def test_a_new_life_at_the_same_address_starts_empty(rig: Rig, first_seq: int, replay: bool) -> None:
    """Whether the new numbers begin below, at or above the old ones."""
    publisher = rig.engine()
    async with subscribed(rig, replay=replay) as (held, subscriber):
        await until(lambda: subscriber.connected and not subscriber.syncing)
        await _publish_until_seen(publisher, held)
        for number in range(4):
            publisher.publish(block(number))
        await until(lambda: held.hashes[-4:] == [0, 1, 2, 3])
        publisher.close()
        await until(lambda: held.restarts == ["disconnected"])
        assert held.hashes == []
        second = rig.engine(first_seq=first_seq)
        await until(lambda: subscriber.connected and not subscriber.syncing)
        await _publish_until_seen(second, held)
        assert set(held.hashes) == {-1}


async def _publish_until_seen(publisher: Publisher, held: Held) -> None:
    """Without replay, what comes before the subscription is lost, as with any engine."""

    def seen() -> bool:
        publisher.publish(block(-1) | {"token_ids": tokens_of(1)})
        return bool(held.hashes)

    await until(seen)


async def test_a_replay_endpoint_that_never_answers_is_done_without(rig: Rig) -> None:
    publisher = rig.engine(replay_port=None)
    async with subscribed(rig, reply_deadline_s=0.05) as (held, subscriber):
        await until(lambda: subscriber.counts.failed_replays > 0)
        await _publish_until_seen(publisher, held)
        assert set(held.hashes) == {-1}


async def test_paused_means_deaf_and_empty(rig: Rig) -> None:
    publisher = rig.engine()
    publisher.publish(block(0))
    async with subscribed(rig) as (held, subscriber):
        await until(lambda: held.hashes == [0])
        subscriber.pause("engine_gone")
        await until(lambda: held.restarts == ["engine_gone"])
        publisher.publish(block(1))
        subscriber.resume()
        await until(lambda: held.hashes == [0, 1])

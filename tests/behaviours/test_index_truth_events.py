"""Engine events in any order: what a catalogue holds in the end is the fold by (life, number), or less, never more.

Seeded schedules of what an engine, its publisher and a network do to each other. An ordinary run looks at 10,000 orders
of batches, at 1,500 with an engine's events and a catalogue, and at 60 of four replicas and ranks; with --slow more.
Report streams: 500 in test_index_truth_reports.py; the index: 10,000 in tests/unit/test_placement_schedules.py. The
whole agent on real sockets: test_index_truth.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from agent_support import CLEARED, MODEL, SEED, chain_of, removed, stored, tokens_of

from kvstore.messages import Tier
from replica_agent.catalogue import Catalogue
from replica_agent.events.decode import EventBatch, decode_batch
from replica_agent.events.sequencer import EventSequencer
from replica_agent.events.subscriber import KvEventSubscriber


class Schedule:
    """A publisher with a ring, a network that loses, and replies that come late and in pieces, before one sequencer.

    `publish` makes the payload of a life's next batch. `lossless` is whether all that this life published can be had.
    """

    def __init__(self, rng: random.Random, sequencer: EventSequencer, publish: Callable[[int, int], bytes]) -> None:
        self.rng = rng
        self.sequencer = sequencer
        self._publish = publish
        self._ring_size = rng.choice((1, 3, 8, 1000))
        self._loss = rng.choice((0.0, 0.1, 0.5))
        self.life = self.published = 0
        self.lossless = True
        self.ring: dict[int, bytes] = {}
        self._pipe: list[tuple[int, bytes]] = []
        self._asked: Any = None
        self._reply: list[tuple[int, bytes] | None] = []

    def turn(self) -> None:
        """Something happens."""
        action, rng = self.rng.random(), self.rng
        if action < 0.45:
            payload = self.ring[self.published] = self._publish(self.life, self.published)
            if rng.random() >= self._loss:
                self._pipe.append((self.published, payload))
            self.published += 1
            while len(self.ring) > self._ring_size:
                del self.ring[min(self.ring)]
                self.lossless = False
        elif action < 0.7 and self._pipe:
            self.sequencer.live(*self._pipe.pop(0))
        elif action < 0.95:
            self._serve()
        elif action < 0.97:
            # The engine restarts; the lost connection is told from outside, and takes both pipes with it.
            self.life, self.published, self.lossless = self.life + 1, 0, True
            self.ring, self._pipe, self._reply, self._asked = {}, [], [], None
            self.sequencer.begin("disconnected")
        self.sequencer.check()

    def _serve(self) -> None:
        wanted = self.sequencer.wanted
        if wanted is not None and wanted is not self._asked:
            self._asked = wanted
            reply = [(seq, self.ring[seq]) for seq in sorted(self.ring) if seq >= wanted.start]
            # A ROUTER drops what comes too fast for its peer, never the first.
            self._reply = [*reply[:1], *(item for item in reply[1:] if self.rng.random() >= self._loss / 4), None]
        if self._asked is not None and self._reply:
            item = self._reply.pop(0)
            if item is None:
                self.sequencer.replay_ended(self._asked)
            else:
                self.sequencer.replayed(self._asked, *item)

    def settle(self) -> None:
        """Everything that is on its way arrives, and all that can be had is asked for."""
        while self._pipe:
            self.sequencer.live(*self._pipe.pop(0))
            self.sequencer.check()
        self._replay()
        self.sequencer.check_tail()
        self._replay()
        self.sequencer.check()

    def _replay(self) -> None:
        for _ in range(200):
            wanted = self.sequencer.wanted
            if wanted is None:
                return
            for seq in sorted(self.ring):
                if seq >= wanted.start:
                    self.sequencer.replayed(wanted, seq, self.ring[seq])
            self.sequencer.replay_ended(wanted)
        raise AssertionError("never at peace")


def check_run(applied: list[bytes], last: int | None) -> None:
    """What was applied since the last clear is a run of one life, without a hole, up to the last number."""
    if applied:
        lives, numbers = zip(*(map(int, item.split(b":")) for item in applied), strict=True)
        assert len(set(lives)) == 1
        assert list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] == last


def test_any_interleaving_is_the_fold_of_its_batches(times: int) -> None:
    """At every moment a run of the present life; in the end up to the last batch, and from the first if it is there."""
    for seed in range(10_000 * times):
        rng = random.Random(seed)
        applied: list[bytes] = []
        sequencer = EventSequencer(applied.append, lambda reason, applied=applied: applied.clear(), can_replay=True)  # type: ignore[misc]
        schedule = Schedule(rng, sequencer, lambda life, seq: b"%d:%d" % (life, seq))
        try:
            for _ in range(rng.randrange(60)):
                schedule.turn()
                check_run(applied, sequencer.last)
            schedule.settle()
            check_run(applied, sequencer.last)
            if schedule.published:
                assert applied[-1] == b"%d:%d" % (schedule.life, schedule.published - 1)
                assert int(applied[0].split(b":")[1]) <= min(schedule.ring)
                if schedule.lossless:
                    assert len(applied) == schedule.published
            else:
                assert applied == []
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error


class Engine:
    """The naive twin: copies by hash, and what a step did to them as a batch of events."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.life = 0
        self.copies: Counter[int] = Counter()

    def step(self, life: int, seq: int) -> bytes:
        """One batch of a life."""
        if life != self.life:
            self.life, self.copies = life, Counter()
        events: list[Any] = []
        twice = 0
        for _ in range(self.rng.randrange(1, 4)):
            action, block = self.rng.random(), self.rng.randrange(1, 12)
            if action < 0.6:
                # Every block of its chain from the first that is missing on, as an engine computes it.
                path = [block]
                while path[0] // 3:
                    path.insert(0, path[0] // 3)
                computed = [each for each in path if not self.copies[each]] or [block]
                if twice and computed[0] // 3 == twice:
                    # A first block that is computed twice has no child behind it: that is how it is told again.
                    continue
                twice = block if self.copies[block] and block < 3 else 0
                for each in computed:
                    self.copies[each] += 1
                    events.append(stored([each], tokens_of(each), parent=each // 3 or None))
            elif action < 0.95:
                leaves = [
                    each for each in self.copies.elements() if not any(self.copies[each * 3 + at] for at in range(3))
                ]
                if leaves:
                    gone = self.rng.choice(leaves)
                    self.copies[gone] -= 1
                    events.append(removed(gone))
            else:
                self.copies.clear()
                events.append(CLEARED)
        return msgspec.msgpack.encode([float(seq), events, 0])

    def keys(self) -> set[int]:
        """RouteKeys of what it holds."""
        found = set()
        for block in +self.copies:
            path = [block]
            while path[0] // 3:
                path.insert(0, path[0] // 3)
            found.add(chain_of(path)[-1])
        return found


def test_any_interleaving_ends_with_what_the_engine_holds(times: int) -> None:
    """The same with real batches and a catalogue: what is held, or, where something is lost for good, less."""
    exact = 0
    for seed in range(1_500 * times):
        rng = random.Random(seed)
        catalogue, engine = Catalogue(MODEL, SEED), Engine(rng)
        sequencer = EventSequencer(
            lambda payload, catalogue=catalogue: catalogue.apply(decode_batch(payload).events),  # type: ignore[misc]
            lambda reason, catalogue=catalogue: catalogue.reset(MODEL),  # type: ignore[misc]
            can_replay=True,
        )
        schedule = Schedule(rng, sequencer, engine.step)
        try:
            for _ in range(rng.randrange(60)):
                schedule.turn()
            schedule.settle()
            catalogue.check()
            known, held = set(catalogue.held(Tier.HBM)[0]), engine.keys() if schedule.published else set()
            assert known <= held
            if schedule.lossless:
                exact += 1
                assert known == held
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
    assert exact > 400 * times


class Sink:
    """What a subscriber tells, in a catalogue."""

    def __init__(self) -> None:
        self.catalogue = Catalogue(MODEL, SEED)

    def apply(self, batch: EventBatch) -> None:
        self.catalogue.apply(batch.events)

    def restart(self, reason: str) -> None:
        self.catalogue.reset(MODEL)


def test_replicas_are_isolated(times: int) -> None:
    """Two replicas of two ranks each, every agent hearing both ranks: what is told of one replica, rank, tier or group
    changes what is held in no other. Against sets, one for each of them."""
    kinds = ["full_attention", "sliding_window", "mamba"]
    media = {Tier.HBM: "GPU", Tier.DRAM: "CPU"}
    for seed in range(60 * times):
        rng = random.Random(seed)
        places = [(replica, rank) for replica in range(2) for rank in range(2)]
        sinks = {place: Sink() for place in places}
        subscribers = {
            (replica, rank): KvEventSubscriber(sinks[replica, rank], "tcp://127.0.0.1:1", None, dp_rank=rank)
            for replica, rank in places
        }
        twin: dict[tuple[int, int, Tier], Counter[int]] = {
            (*place, tier): Counter() for place in places for tier in media
        }
        numbers: Counter[int] = Counter()
        for _ in range(120):
            replica, rank = rng.choice(places)
            tier, group, block = rng.choice(list(media)), rng.randrange(3), rng.randrange(5)
            mine = twin[replica, rank, tier]
            action = rng.random()
            if action < 0.55:
                event = stored(
                    [block], tokens_of(block), medium=media[tier], group_idx=group, kv_cache_spec_kind=kinds[group]
                )
                if group == 0:
                    mine[block] += 1
            elif action < 0.95:
                event = removed(block, medium=media[tier], group_idx=group)
                if group == 0 and mine[block]:
                    mine[block] -= 1
            else:
                event = CLEARED
                for each in media:
                    twin[replica, rank, each].clear()
            payload = msgspec.msgpack.encode([1.0, [event], rank])
            for heard in (0, 1):
                subscribers[replica, heard]._sequencer.live(numbers[replica], payload)
            numbers[replica] += 1
            for other in places:
                held = {each: set(sinks[other].catalogue.held(each)[0]) for each in media}
                assert held == {each: {chain_of([b])[0] for b in +twin[(*other, each)]} for each in media}, seed
        for place in places:
            sinks[place].catalogue.check()
        assert sum(subscriber.counts.other_rank for subscriber in subscribers.values()) == 120

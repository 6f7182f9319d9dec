"""Whatever way batches come, what the sequencer applies adds up to a run of the engine's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica_agent.events.sequencer import EventSequencer


class Recorder:
    """What was applied since the last clear."""

    def __init__(self, *, can_replay: bool = True, limit: int = 1000) -> None:
        self.applied: list[bytes] = []
        self.clears: list[str] = []
        self.sequencer = EventSequencer(self.applied.append, self._clear, can_replay=can_replay, limit=limit)

    def _clear(self, reason: str) -> None:
        self.applied.clear()
        self.clears.append(reason)

    def replay(self, ring: dict[int, bytes], lose: int | None = None) -> None:
        """Carries out wishes for replays until there is none; the reply to the first lacks number `lose`."""
        for _ in range(200):
            wanted = self.sequencer.wanted
            if wanted is None:
                return
            for seq in sorted(ring):
                if seq >= wanted.start and seq != lose:
                    self.sequencer.replayed(wanted, seq, ring[seq])
            self.sequencer.replay_ended(wanted)
            lose = None
        raise AssertionError("never at peace")


def payload(seq: int, life: int = 0) -> bytes:
    return f"{life}:{seq}".encode()


def run_of(first: int, last: int, life: int = 0) -> list[bytes]:
    return [payload(seq, life) for seq in range(first, last + 1)]


def test_live_batches_wait_for_the_replay_and_follow_it() -> None:
    recorder = Recorder()
    sequencer = recorder.sequencer
    sequencer.live(2, payload(2))
    sequencer.live(3, payload(3))
    assert recorder.applied == []
    recorder.replay({seq: payload(seq) for seq in range(3)})
    assert recorder.applied == run_of(0, 3)
    assert recorder.clears == []


def test_batches_that_the_replay_overtook_are_repeats() -> None:
    recorder = Recorder()
    recorder.replay({seq: payload(seq) for seq in range(5)})
    for seq in (3, 4, 5):
        recorder.sequencer.live(seq, payload(seq))
    assert recorder.applied == run_of(0, 5)
    assert recorder.clears == []


def test_the_same_numbers_with_other_content_are_another_life() -> None:
    recorder = Recorder()
    recorder.replay({seq: payload(seq) for seq in range(5)})
    recorder.sequencer.live(3, payload(3, life=1))
    assert recorder.clears == ["sequence_went_back"]
    recorder.replay({seq: payload(seq, life=1) for seq in range(4)})
    assert recorder.applied == run_of(0, 3, life=1)


@pytest.mark.parametrize("can_replay", [True, False])
def test_a_number_going_back_is_another_life(can_replay: bool) -> None:
    recorder = Recorder(can_replay=can_replay)
    recorder.replay({})
    for seq in range(4):
        recorder.sequencer.live(seq, payload(seq))
    recorder.sequencer.live(0, payload(0, life=1))
    assert recorder.clears == ["sequence_went_back"]
    recorder.replay({0: payload(0, life=1)})
    assert recorder.applied == run_of(0, 0, life=1)


def test_a_gap_is_replayed() -> None:
    recorder = Recorder()
    recorder.replay({})
    recorder.sequencer.live(0, payload(0))
    recorder.sequencer.live(4, payload(4))
    assert recorder.applied == run_of(0, 0)
    recorder.replay({seq: payload(seq) for seq in range(5)})
    assert (recorder.applied, recorder.clears, recorder.sequencer.gaps) == (run_of(0, 4), [], 1)


@pytest.mark.parametrize("lose", [0, 1, 3, 4])
def test_a_hole_in_the_reply_itself_is_asked_for_again(lose: int) -> None:
    recorder = Recorder()
    recorder.replay({})
    recorder.sequencer.live(0, payload(0))
    recorder.sequencer.live(5, payload(5))
    recorder.replay({seq: payload(seq) for seq in range(6)}, lose=lose)
    assert recorder.applied == (run_of(2, 5) if lose == 1 else run_of(0, 5))


def test_live_batches_that_have_left_the_ring_come_first() -> None:
    recorder = Recorder()
    recorder.sequencer.live(0, payload(0))
    recorder.sequencer.live(1, payload(1))
    recorder.replay({1: payload(1)})
    assert (recorder.applied, recorder.clears) == (run_of(0, 1), [])


def test_a_gap_that_the_ring_no_longer_holds_empties() -> None:
    recorder = Recorder()
    recorder.replay({})
    recorder.sequencer.live(0, payload(0))
    recorder.sequencer.live(9, payload(9))
    recorder.replay({seq: payload(seq) for seq in range(6, 10)})
    assert (recorder.applied, recorder.clears) == (run_of(6, 9), ["gap"])


def test_a_gap_without_replay_empties() -> None:
    recorder = Recorder(can_replay=False)
    recorder.sequencer.live(5, payload(5))
    recorder.sequencer.live(7, payload(7))
    assert (recorder.applied, recorder.clears) == (run_of(7, 7), ["gap"])


def test_a_replay_that_fails_counts_as_none() -> None:
    recorder = Recorder()
    recorder.sequencer.live(5, payload(5))
    wanted = recorder.sequencer.wanted
    assert wanted is not None
    recorder.sequencer.replay_failed(wanted)
    assert (recorder.applied, recorder.clears) == (run_of(5, 5), [])
    recorder.sequencer.live(8, payload(8))
    wanted = recorder.sequencer.wanted
    assert wanted is not None
    recorder.sequencer.replay_failed(wanted)
    assert (recorder.applied, recorder.clears) == (run_of(8, 8), ["gap"])


def test_the_tail_is_fetched_when_the_last_batch_was_lost() -> None:
    recorder = Recorder()
    recorder.replay({})
    recorder.sequencer.live(0, payload(0))
    recorder.sequencer.check_tail()
    recorder.replay({0: payload(0), 1: payload(1)})
    assert (recorder.applied, recorder.clears) == (run_of(0, 1), [])


def test_too_many_waiting_batches_end_the_wait() -> None:
    recorder = Recorder(limit=3)
    for seq in range(4):
        recorder.sequencer.live(seq, payload(seq))
    assert not recorder.sequencer.syncing
    assert recorder.applied == run_of(0, 3)


@given(st.data())
def test_any_interleaving_adds_up(data: st.DataObject) -> None:
    """An engine publishes, a network loses, a ring forgets, replies come late and in pieces, in any order.

    At every moment what is applied is a run of the present life ending at the last number applied; once everything has
    been asked for, it ends at the last batch published and reaches back as far as nothing was lost for good.
    """
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    ring_size = data.draw(st.sampled_from([1, 3, 8, 1000]))
    loss = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    recorder = Recorder()
    sequencer = recorder.sequencer
    life, published = 0, 0
    ring: dict[int, bytes] = {}
    pipe: list[tuple[int, bytes]] = []
    reply: list[tuple[int, bytes] | None] = []
    asked = None
    oldest_missing_ok = True

    def check() -> None:
        sequencer.check()
        if recorder.applied:
            lives = {item.split(b":")[0] for item in recorder.applied}
            assert len(lives) == 1
            first, last = (int(recorder.applied[end].split(b":")[1]) for end in (0, -1))
            assert recorder.applied == run_of(first, last, int(lives.pop()))
            assert last == sequencer.last

    for _ in range(data.draw(st.integers(0, 80))):
        action = rng.random()
        if action < 0.45:
            ring[published] = payload(published, life)
            if rng.random() >= loss:
                pipe.append((published, ring[published]))
            published += 1
            while len(ring) > ring_size:
                del ring[min(ring)]
                oldest_missing_ok = False
        elif action < 0.7 and pipe:
            sequencer.live(*pipe.pop(0))
        elif action < 0.95:
            if sequencer.wanted is not None and sequencer.wanted is not asked:
                asked = sequencer.wanted
                reply = [(seq, ring[seq]) for seq in sorted(ring) if seq >= asked.start]
                # A ROUTER drops what comes too fast for its peer, never the first.
                reply = [*reply[:1], *(item for item in reply[1:] if rng.random() >= loss / 4), None]
            if asked is not None and reply:
                item = reply.pop(0)
                if item is None:
                    sequencer.replay_ended(asked)
                else:
                    sequencer.replayed(asked, *item)
        elif action < 0.97:
            # The engine restarts; the lost connection is told from outside, and takes both pipes with it.
            life, published, ring, pipe, reply, asked = life + 1, 0, {}, [], [], None
            sequencer.begin("disconnected")
            oldest_missing_ok = True
        check()
    while pipe:
        sequencer.live(*pipe.pop(0))
        check()
    recorder.replay(ring)
    sequencer.check_tail()
    recorder.replay(ring)
    check()
    if published:
        assert recorder.applied[-1] == payload(published - 1, life)
        if oldest_missing_ok and not loss:
            assert recorder.applied == run_of(0, published - 1, life)
        assert recorder.applied[0] in {payload(seq, life) for seq in range(min(ring) + 1)}
    else:
        assert recorder.applied == []

"""Whatever way batches come, what the sequencer applies adds up to a run of the engine's own. Case by case; thousands
of schedules: tests/behaviours/test_index_truth_events.py."""

from __future__ import annotations

import pytest

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

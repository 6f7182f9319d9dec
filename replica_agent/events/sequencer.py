"""Puts live and replayed batches of KV events into one order. Pure: no socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import xxhash

BUFFER_LIMIT = 100_000
"""Live batches kept while a replay runs; as many as vLLM's own queue (`max_queue_size`) may hold."""

REMEMBERED = 20_000
"""Applied batches whose fingerprints are kept, to tell a repeat from another life; twice vLLM's default ring."""

_NOTHING = -1  # `last` of an engine that has said it published nothing yet


class Replay:
    """One wish for a replay from `start`. Whoever carries it out drops it when the sequencer wants another one."""

    __slots__ = ("begun", "progressed", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.begun = False
        self.progressed = False


class EventSequencer:
    """Decides for every batch whether it is applied now, kept, dropped as a repeat, or proof that some were lost.

    Owns the number of the last applied batch and the live batches waiting for a replay. Calls `apply(payload)` in the
    engine's order and without holes, and `clear(reason)` whenever what was applied before can no longer be vouched for.
    After a clear only later batches follow, so what they add up to is never more than what the engine holds.

    `wanted` is the replay to ask the engine for, None when all is well. Whoever asks passes it back with every batch of
    the reply and at its end; replies to an older wish are ignored. Batches are numbered from 0 by each life of an
    engine. Only numbers and payloads are looked at, so a life that goes on exactly where the last one ended must be
    told from outside, with `begin`.
    """

    def __init__(
        self,
        apply: Callable[[bytes], None],
        clear: Callable[[str], None],
        *,
        can_replay: bool,
        limit: int = BUFFER_LIMIT,
    ) -> None:
        self._apply_payload = apply
        self._clear = clear
        self._can_replay = can_replay
        self._limit = limit
        self.gaps = 0
        self._start_life()

    def begin(self, reason: str) -> None:
        """The engine may be another one now: forgets everything and starts from 0."""
        self._clear(reason)
        self._start_life()

    def _start_life(self) -> None:
        self.last: int | None = None
        self.wanted: Replay | None = Replay(0) if self._can_replay else None
        self._newest_live: int | None = None
        self._buffer: dict[int, bytes] = {}
        self._fingerprints: OrderedDict[int, int] = OrderedDict()

    @property
    def syncing(self) -> bool:
        """Whether a replay is still to come or under way."""
        return self.wanted is not None

    def live(self, seq: int, payload: bytes) -> None:
        """A batch from the subscription, in the order it came."""
        if self._newest_live is not None and seq <= self._newest_live:
            self.begin("sequence_went_back")
        self._newest_live = seq
        if self.wanted is None:
            self._take(seq, payload)
            return
        self._buffer[seq] = payload
        if len(self._buffer) > self._limit:
            self.replay_failed(self.wanted)

    def check_tail(self) -> None:
        """Wants what may have been lost behind the last batch: the stream itself shows that only with the next one."""
        if self._can_replay and self.wanted is None:
            self.wanted = Replay(0 if self.last is None else self.last + 1)

    def replayed(self, replay: Replay, seq: int, payload: bytes) -> None:
        """A batch of the reply to `replay`."""
        if replay is not self.wanted:
            return
        first, replay.begun = not replay.begun, True
        if first:
            # What came live and has left the ring since.
            for older in sorted(number for number in self._buffer if number < seq):
                self._advance(older, self._buffer.pop(older))
                if replay is not self.wanted:
                    return
        kept = self._buffer.pop(seq, payload)
        if kept != payload:
            self.begin("other_life")
        elif self.last is None or seq == self.last + 1:
            replay.progressed = True
            self._apply(seq, payload)
        elif seq <= self.last:
            if not self._is_repeat(seq, payload):
                self.begin("other_life")
        elif first:
            replay.progressed = True
            self._advance(seq, payload)
        else:
            # The ring had it and the way here lost it (a ROUTER drops when its peer is slow): ask again from the hole.
            self.wanted = Replay(self.last + 1)
            self._buffer[seq] = payload

    def replay_ended(self, replay: Replay) -> None:
        """The reply to `replay` is complete: what was kept follows, unless it shows that more is missing."""
        if replay is self.wanted:
            if self.last is None:
                self.last = _NOTHING
            self._resume(ask_again=replay.progressed)

    def replay_failed(self, replay: Replay) -> None:
        """No reply to `replay` is to be had: goes on with what came live, without what a hole cannot vouch for."""
        if replay is self.wanted:
            self._resume(ask_again=False)

    def check(self) -> None:
        """Asserts that batches are kept only for a replay, and the last one applied is remembered."""
        assert self.syncing or not self._buffer, f"{len(self._buffer)} batches kept and no replay wanted"
        assert len(self._buffer) <= self._limit
        assert self.last is None or self.last == _NOTHING or self.last in self._fingerprints

    def reject(self, reason: str) -> None:
        """A batch just handed out could not be read: nothing up to it can be vouched for, what follows is taken on."""
        self._clear(reason)

    def _resume(self, *, ask_again: bool) -> None:
        kept, self._buffer = sorted(self._buffer.items()), {}
        self.wanted = None
        for index, (seq, payload) in enumerate(kept):
            if ask_again and self.last is not None and seq > self.last + 1:
                self.wanted = Replay(self.last + 1)
                self._buffer = dict(kept[index:])
                return
            self._advance(seq, payload)
            if self.syncing:
                return  # another life: its replay brings the rest

    def _advance(self, seq: int, payload: bytes) -> None:
        """Takes a batch that nothing can come before any more."""
        if self.last is not None and seq > self.last + 1:
            self._lost()
            self._apply(seq, payload)
        else:
            self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> None:
        if self.last is None or seq == self.last + 1:
            self._apply(seq, payload)
        elif seq <= self.last:
            # Batches that the replay was quicker to bring are still in the subscription's pipe.
            if not self._is_repeat(seq, payload):
                self.begin("sequence_went_back")
                self.live(seq, payload)
        elif self._can_replay:
            self.gaps += 1
            self.wanted = Replay(self.last + 1)
            self._buffer[seq] = payload
        else:
            self.gaps += 1
            self._lost()
            self._apply(seq, payload)

    def _lost(self) -> None:
        if self.last != _NOTHING:
            self._clear("gap")

    def _apply(self, seq: int, payload: bytes) -> None:
        self.last = seq
        self._fingerprints[seq] = xxhash.xxh3_64_intdigest(payload)
        if len(self._fingerprints) > REMEMBERED:
            self._fingerprints.popitem(last=False)
        self._apply_payload(payload)

    def _is_repeat(self, seq: int, payload: bytes) -> bool:
        return self._fingerprints.get(seq) == xxhash.xxh3_64_intdigest(payload)

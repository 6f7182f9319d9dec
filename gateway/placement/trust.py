"""How far the reports of each replica are to be believed, by what its engine then took from its cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from gateway.placement.holders import Change
from kvstore.messages import Tier

WEIGHT = 0.2
"""Share of a new request in a replica's average: about the last ten count."""
WHOLE = 0.9
"""From here on claims are taken whole. A claim that was withdrawn in time is not counted at all, so what is left below
this is no noise; and two gateways that differ by less agree on their placements."""
GROSS = 0.5
"""An engine that had less than this share of what was reported makes the reports worthless, at the first request. No
more than this is believed after it."""
QUARANTINE_S = 5.0
MOST_QUARANTINE_S = 320.0
"""A quarantine takes twice as long as the last, if the replica has not been trusted wholly in between."""
SETTLE_S = 0.5
"""After an answer, for reports that say why less was cached than they had said. They come with the engine's next step;
heartbeats, without which nothing is judged, every 250 ms."""

_NOBODY = "no request has been compared yet"


class Standing(StrEnum):
    """What a replica's claims are worth: all, a share, nothing."""

    TRUSTED = "trusted"
    DISCOUNTED = "discounted"
    QUARANTINED = "quarantined"


class TrustState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one replica, for operators. `value` is the average share of the reported tokens that were really
    cached, `credit` by what its claims are multiplied now; `quarantined_s` is left of a quarantine. Counts are requests
    compared, those of them in which more than a block was missing, and quarantines; `why` is the last reason for one.
    """

    standing: Standing
    value: float
    credit: float
    quarantined_s: float
    judged: int
    contradicted: int
    quarantines: int
    why: str


class Expectation:
    """A request whose replica has reported to hold `tokens` of its prompt in HBM, up to the block `key`.

    Made by `Trust.expect`; `live` until it is judged, dropped, or withdrawn by a report that the block is gone.
    """

    __slots__ = ("block_tokens", "cached", "due", "key", "live", "replica", "request_id", "tokens")

    def __init__(self, replica: str, request_id: str, key: int, tokens: int, block_tokens: int) -> None:
        self.replica = replica
        self.request_id = request_id
        self.key = key
        self.tokens = tokens
        self.block_tokens = block_tokens
        self.cached = 0
        self.due = 0.0
        self.live = True


class _Record:
    __slots__ = ("contradicted", "judged", "quarantines", "strikes", "until", "value", "why")

    def __init__(self) -> None:
        self.value = 1.0
        self.until = float("-inf")
        self.strikes = 0
        self.judged = 0
        self.contradicted = 0
        self.quarantines = 0
        self.why = ""


class Trust:
    """Compares what was reported with what engines say they had cached, and says what each replica's claims are worth.

    Only reports are judged, and only those of HBM: not what this gateway believes to be on its way, nor what was to be
    fetched. An engine may evict between a placement and its turn; so a claim is judged at a heartbeat, `SETTLE_S` after
    the answer, and not at all if by then the replica has reported that the claim's last block is gone (engines evict
    tails before heads; agents also tell of one that is back already), or its stream was lost. One
    block less than claimed is no contradiction: engines that draft tokens recompute the last.

    A claim is multiplied by the average of actual over reported tokens. A gross contradiction is a quarantine: for its
    time the claims are worth nothing, and `on_quarantine` has the reports taken anew.
    Requests that go there all the same are still compared. After it half of a claim is believed, and more with each
    request that agrees: all of it after eight. A single request decides because the next ones would go wrong as well;
    that is also why requests whose clients had the engine pass over its cache must not be judged (`drop` them).

    Owns one record per replica and the live expectations: as many as there are requests in flight or answered within
    the last seconds. Listens to the index. One caller at a time, on the event loop.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        failed_tokens: Callable[[str], int] = lambda request_id: 0,
        on_quarantine: Callable[[str, str], None] = lambda replica, why: None,
    ) -> None:
        """`failed_tokens` are those of a request that its engine counted as cached and then could not load."""
        self._clock = clock
        self._failed_tokens = failed_tokens
        self._on_quarantine = on_quarantine
        self._records: dict[str, _Record] = {}
        self._watched: dict[str, dict[int, list[Expectation]]] = {}
        self._answered: dict[str, deque[Expectation]] = {}

    def credit(self, replica: str) -> float:
        """By what the claims of `replica` are to be multiplied now: 0 in quarantine."""
        record = self._records.get(replica)
        if record is None:
            return 1.0
        if record.until > self._clock():
            return 0.0
        return record.value if record.value < WHOLE else 1.0

    def state(self, replica: str) -> TrustState:
        """What is known of `replica`."""
        record = self._records.get(replica) or _Record()
        credit = self.credit(replica)
        standing = Standing.DISCOUNTED if credit < 1.0 else Standing.TRUSTED
        left = max(0.0, record.until - self._clock())
        return TrustState(
            standing=Standing.QUARANTINED if left else standing,
            value=record.value,
            credit=credit,
            quarantined_s=left,
            judged=record.judged,
            contradicted=record.contradicted,
            quarantines=record.quarantines,
            why=record.why if record.why or record.judged else _NOBODY,
        )

    def expect(self, replica: str, request_id: str, key: int, tokens: int, block_tokens: int) -> Expectation | None:
        """A request goes to `replica`, which reports `tokens` of its prompt in HBM, the last block of them being `key`.

        None for a claim of one block, which could not be contradicted. Ends with `answered` or `drop`.
        """
        if tokens <= block_tokens:
            return None
        made = Expectation(replica, request_id, key, tokens, block_tokens)
        self._watched.setdefault(replica, {}).setdefault(key, []).append(made)
        return made

    def answered(self, expectation: Expectation, cached_tokens: int) -> None:
        """The engine says that it had `cached_tokens` of the prompt: to be judged when reports have had their time."""
        if expectation.live:
            expectation.cached = cached_tokens
            expectation.due = self._clock() + SETTLE_S
            self._answered.setdefault(expectation.replica, deque()).append(expectation)

    def drop(self, expectation: Expectation) -> None:
        """Nothing can be said about it; one that is over already is no error."""
        if not expectation.live:
            return
        expectation.live = False
        watched = self._watched[expectation.replica]
        same = watched[expectation.key]
        same.remove(expectation)
        if not same:
            del watched[expectation.key]
            if not watched:
                del self._watched[expectation.replica]

    def heard(self, replica: str) -> None:
        """A heartbeat of `replica` agrees with the index: judges what was answered long enough before it."""
        waiting = self._answered.get(replica)
        if not waiting:
            return
        now = self._clock()
        while waiting and (not waiting[0].live or waiting[0].due <= now):
            expectation = waiting.popleft()
            if expectation.live:
                self.drop(expectation)
                self._judge(expectation)

    def forget(self, replica: str) -> None:
        """A replica left for good."""
        self._withdraw(replica)
        self._records.pop(replica, None)

    # what listeners of the index are told

    def replica_added(self, replica: str, bit: int) -> None:
        """Index listener: it is trusted until it is contradicted."""

    def replica_removed(self, replica: str, bit: int) -> None:
        """Index listener: what it held is not to be judged any more."""
        self._withdraw(replica)

    def holders_changed(self, change: Change) -> None:
        """Index listener: a claim is withdrawn when its last block is gone, whether evicted, cleared or not known."""
        if change.gained or change.tier is not Tier.HBM or not (watched := self._watched.get(change.replica)):
            return
        for key in watched.keys() & change.keys.tolist():
            for expectation in list(watched[key]):
                self.drop(expectation)

    def check(self) -> None:
        """Asserts that exactly the live expectations are watched, and the bounds of every record."""
        for replica, watched in self._watched.items():
            assert watched
            for key, same in watched.items():
                assert same and all(each.live and (each.replica, each.key) == (replica, key) for each in same)
        for replica, waiting in self._answered.items():
            live = [each for each in waiting if each.live]
            assert all(each in self._watched[replica][each.key] for each in live)
            assert [each.due for each in waiting] == sorted(each.due for each in waiting)
        for record in self._records.values():
            assert 0.0 <= record.value <= 1.0
            assert record.quarantines <= record.contradicted <= record.judged

    # judging

    def _withdraw(self, replica: str) -> None:
        for same in list(self._watched.get(replica, {}).values()):
            for expectation in list(same):
                self.drop(expectation)
        self._answered.pop(replica, None)

    def _judge(self, expectation: Expectation) -> None:
        replica, claimed = expectation.replica, expectation.tokens
        record = self._records.setdefault(replica, _Record())
        actual = max(0, expectation.cached - self._failed_tokens(expectation.request_id))
        agrees = claimed - actual <= expectation.block_tokens
        share = 1.0 if agrees else actual / claimed
        record.judged += 1
        record.value += WEIGHT * (share - record.value)
        if agrees:
            if record.value >= WHOLE:
                record.strikes = 0
            return
        record.contradicted += 1
        now = self._clock()
        if share >= GROSS or record.until > now:
            return
        record.value = min(record.value, GROSS)
        record.until = now + min(QUARANTINE_S * 2**record.strikes, MOST_QUARANTINE_S)
        record.strikes = min(record.strikes + 1, 16)
        record.quarantines += 1
        record.why = f"it reported {claimed} tokens of {expectation.request_id} as cached, its engine had {actual}"
        self._on_quarantine(replica, record.why)

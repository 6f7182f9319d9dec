"""One request's search for its blocks: in the agent's pool, and where that beats computing them, at a peer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.engine_messages import Accepted, Loading, Nothing, Pending, Prepare, Ready, Release
from kvstore.errors import HintRefused
from kvstore.hint import Hint
from kvstore.messages import FetchOutcome
from kvstore.pool import Held
from replica_agent.kv.decision import Estimates, Prompt
from replica_agent.kv.fetch import Fetched, Order, Surroundings
from replica_agent.kv.fetches import Coming, Fetches
from replica_agent.kv.records import Account, FetchLog, Steps

_logger = logging.getLogger(__name__)

OWN_DEADLINE_S = 5.0
"""For blocks that are in the pool already: the engine has only to ask again."""


class State(Enum):
    """DECIDING -> LOADING -> READY -> OVER; each but OVER may be left out."""

    DECIDING = 0
    LOADING = 1
    READY = 2
    OVER = 3


@dataclass(frozen=True)
class Desk:
    """What every search of an agent works with. `mode`: on, shadow or off; `secret` is what hints are signed with."""

    mode: str
    secret: str
    replica: str
    estimates: Estimates
    fetches: Fetches
    log: FetchLog
    hold_s: float
    clock: Callable[[], float] = time.monotonic


class Search:
    """Owns the pins on the blocks it has found, until it is OVER, and its place among those who wait for a fetch.

    Mutated on one event loop: by its engine's questions, by the fetch it waits for, and by time. What it
    says is valid until the next of these. Exactly one record is written, when it gets OVER.
    """

    def __init__(
        self, desk: Desk, around: Surroundings, asked: Prepare, keys: Sequence[bytes], block_tokens: int
    ) -> None:
        self.state = State.OVER
        self.reason = ""
        self.deadline = 0.0
        self._desk = desk
        self._around = around
        self._asked = asked
        self._keys = keys
        self._prompt = Prompt(asked.prompt_tokens, asked.cached_blocks, block_tokens, around.pool.block_bytes)
        self._told = False
        self._shadow = False
        self._pins: list[Held] = []
        self._coming: Coming | None = None
        self._leads = False
        self._first = self._remote = 0
        self._released: dict[int | None, Release] = {}
        self._news: asyncio.Future[None] | None = None
        hint = asked.hint
        self._account = Account(
            request=asked.request,
            gateway_request=hint.request if hint else "",
            source=hint.source if hint else "",
            block_tokens=block_tokens,
            block_bytes=around.pool.block_bytes,
            began=desk.clock(),
        )
        self._steps = Steps()
        self._begin()

    @property
    def asked(self) -> Prepare:
        """The engine's question."""
        return self._asked

    @property
    def pins(self) -> int:
        """Blocks pinned for it."""
        return len(self._pins)

    def decision(self) -> Pending | Accepted | Nothing:
        """What to say to a Prepare, also to one that comes again."""
        if self.state in (State.DECIDING, State.LOADING) and self._desk.clock() >= self.deadline:
            self._stop_waiting()
            self._settle(FetchOutcome.LATE, "deadline")
        if self.state is State.DECIDING:
            return Pending()
        if self.state is State.OVER:
            return Nothing(reason=self.reason)
        self._told = True
        blocks = len(self._pins) + (self._remote if self.state is State.LOADING else 0)
        return Accepted(blocks=blocks, deadline_s=max(0.0, self.deadline - self._desk.clock()))

    def progress(self) -> Pending | Accepted | Loading | Ready | Nothing:
        """What to say to a Poll: the decision once, then what became of it."""
        told = self._told
        decision = self.decision()
        if not told or not isinstance(decision, Accepted):
            return decision
        if self.state is State.LOADING:
            return self._loading()
        return Ready(slots=[held.slot for held in self._pins], generations=[held.generation for held in self._pins])

    def failed(self, blocks: int) -> None:
        """The engine could not load so many blocks that it had counted as cached."""
        self._account.failed += blocks

    async def news(self, wait_s: float) -> None:
        """Returns when there is something else to say, or after `wait_s`."""
        if self._coming is None:
            return
        news = self._news = self._news or asyncio.get_running_loop().create_future()
        # Others may wait for the same.
        await asyncio.wait({news}, timeout=wait_s)

    def release(self, done: Release, rank: int | None = None) -> None:
        """The engine's `rank` has copied what it wanted; None speaks for all. Once all have it is over."""
        if self.state is not State.READY:
            self.end("not_ready")
            return
        self._released[rank] = done
        if rank is not None and len(self._released) < self._around.ranks:
            return
        account = self._account
        loaded = max(0, min(len(self._pins), *(each.loaded for each in self._released.values())))
        copy_s = max(each.copy_s for each in self._released.values())
        if loaded:
            self._desk.estimates.copied(loaded * account.block_bytes, copy_s)
        if self._shadow:
            outcome, reason = FetchOutcome.SHADOW, "shadow"
        elif not loaded:
            outcome, reason = FetchOutcome.CANCELLED, "not_copied"
            if account.failed:
                outcome, reason = FetchOutcome.FAILED, "not_copied"
        elif loaded < account.asked:
            outcome = FetchOutcome.PARTIAL
            reason = "not_copied" if loaded < len(self._pins) else self.reason
        else:
            outcome = FetchOutcome.FETCHED if account.moved else FetchOutcome.LOCAL
            reason = self.reason
        self._over(outcome, reason, loaded=loaded, copy_s=copy_s)

    def end(self, reason: str) -> None:
        """Nothing is wanted any more. What the engine was told to copy is kept for a while: it may be doing it."""
        if self.state is not State.OVER:
            self._stop_waiting()
            self._over(FetchOutcome.CANCELLED, reason, hold=True)

    def check(self) -> None:
        """Asserts that pins and the wait for a fetch are there exactly as long as they are needed."""
        assert (self._coming is not None) == (self.state in (State.DECIDING, State.LOADING))
        assert not (self.state is State.OVER and self._pins)
        for held in self._pins:
            assert self._around.pool.pins(held)

    # What the fetch tells.

    def fetch_decided(self, blocks: int) -> None:
        """So many blocks of the fetch are coming; some of them are this search's."""
        self._stir()
        self._remote = max(0, min(self._remote, blocks - self._first))
        if self._remote:
            self.state = State.LOADING
            self._decided(len(self._pins), self._remote)
        else:
            self._stop_waiting()
            self._settle(FetchOutcome.MISSED, "not_held")

    def fetch_over(self, result: Fetched) -> None:
        """It has ended, and what it brought is in the pool."""
        self._stir()
        coming, self._coming = self._coming, None
        assert coming is not None
        own = len(self._pins)
        wanted = self._remote if result.blocks else 0
        self._pins += self._around.pool.pin(self._keys[own : own + wanted])
        if self._leads:
            self._account.transport = coming.fetch.transport
            self._account.moved = len(self._pins) - own
            self._steps = coming.steps
        if result.outcome is FetchOutcome.DECLINED:
            self._account.asked = own
        self._settle(result.outcome, result.reason if self._leads or not result.blocks else "joined")

    # How it comes to what it does.

    def _loading(self) -> Loading:
        assert self._coming is not None
        fetch, first = self._coming.fetch, self._first
        own = [held.slot for held in self._pins]
        return Loading(
            slots=own + fetch.show()[first : first + self._remote], there=len(own), cell=fetch.cell, before=first
        )

    def _stir(self) -> None:
        """There is news, valid from the next turn of the event loop on."""
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    def _begin(self) -> None:
        desk, account = self._desk, self._account
        self.deadline = account.began + OWN_DEADLINE_S
        self._pins = self._around.pool.pin(self._keys)
        own = account.own = account.asked = len(self._pins)
        if own:
            self._decided(own, 0)
            if not desk.estimates.worth_copying(self._prompt, own):
                self._around.pool.unpin(self._pins)
                self._pins = []
                self._settle(FetchOutcome.DECLINED, "cheaper_to_compute")
                return
        if self._join():
            return
        outcome, reason, hint = self._hint()
        remote = min(len(self._keys), hint.blocks - self._asked.cached_blocks) - own if hint else 0
        if hint is not None and remote > 0:
            self._decided(own, remote)
            outcome, reason = self._weigh(hint, own, remote)
            if self._coming is not None:
                return
        self._settle(outcome, reason or ("complete" if own else "not_held"))

    def _hint(self) -> tuple[FetchOutcome, str, Hint | None]:
        """The hint, if it can be followed; and what to say where nothing else comes of the search."""
        hint = self._asked.hint
        if hint is None:
            return FetchOutcome.MISSED, "", None
        try:
            hint.check(self._desk.secret)
        except HintRefused as error:
            _logger.warning("request %s: %s", self._asked.request, error)
            return FetchOutcome.REFUSED, "hint", None
        if hint.source == self._desk.replica:
            return FetchOutcome.MISSED, "own_hint", None
        return FetchOutcome.MISSED, "", hint

    def _join(self) -> bool:
        """Waits for blocks that another request is having fetched, or, where computing them is done before all of that
        fetch is there, does without: nobody else can fetch them meanwhile."""
        desk = self._desk
        own = len(self._pins)
        found = desk.fetches.coming(self._keys[own:])
        if found is None:
            return False
        coming, first, remote = found
        if not desk.estimates.worth_waiting(self._prompt, own, remote, desk.fetches.left_s(coming, self._around)):
            self._settle(FetchOutcome.DECLINED, "cheaper_to_compute")
            return True
        self._coming, self._first, self._remote = coming, first, remote
        self._account.source = coming.order.source
        self._account.asked = own + remote
        self.deadline = coming.order.deadline
        self.state = State.DECIDING
        decided = coming.decided is not None
        desk.fetches.join(coming, self)
        if decided:
            self.state = State.LOADING
            self._decided(own, self._remote)
        return True

    def _weigh(self, hint: Hint, own: int, remote: int) -> tuple[FetchOutcome, str]:
        """Begins a fetch, or says why not."""
        desk, estimates, prompt = self._desk, self._desk.estimates, self._prompt
        if desk.mode == "off":
            return FetchOutcome.DECLINED, "off"
        if estimates.held_back(hint.source):
            return FetchOutcome.DECLINED, "source_fails"
        if not estimates.worth_fetching(prompt, own, remote, hint.source):
            return FetchOutcome.DECLINED, "cheaper_to_compute"
        if desk.mode == "shadow":
            self._shadow = True
            return FetchOutcome.SHADOW, "shadow"
        self.deadline = self._account.began + hint.deadline_ms / 1_000
        order = Order(
            request=hint.request,
            source=hint.source,
            url=hint.url,
            keys=self._keys[own : own + remote],
            parent=self._keys[own - 1] if own else b"",
            deadline=self.deadline,
            worthwhile=lambda blocks: estimates.worth_fetching(prompt, own, blocks, hint.source),
        )
        # In this state before the fetch begins, which may end at once.
        self.state = State.DECIDING
        self._coming = desk.fetches.start(order, self._around, self)
        if self._coming is None:
            return FetchOutcome.FAILED, "too_many"
        self._leads = True
        self._remote = remote
        self._account.asked = own + remote
        return FetchOutcome.FETCHED, ""

    def _decided(self, own: int, remote: int) -> None:
        account = self._account
        account.predicted = self._desk.estimates.predict(self._prompt, own, remote, account.source)
        account.decide_s = self._desk.clock() - account.began

    def _settle(self, outcome: FetchOutcome, reason: str) -> None:
        """No more blocks will come: what is pinned is ready; without any it is over."""
        self.reason = reason
        if self._pins:
            self.state = State.READY
            self.deadline = max(self.deadline, self._account.began + OWN_DEADLINE_S)
        else:
            self._over(outcome, reason)

    def _stop_waiting(self) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            if self._leads:
                self._account.transport, self._steps = coming.fetch.transport, coming.steps
            self._desk.fetches.leave(coming, self)

    def _over(
        self, outcome: FetchOutcome, reason: str, *, loaded: int = 0, copy_s: float = 0.0, hold: bool = False
    ) -> None:
        copying = hold and self._told and self.state is State.READY
        pins, self._pins = self._pins, []
        self._around.pool.unpin(pins, hold_s=self._desk.hold_s if copying else 0.0)
        self.state = State.OVER
        self.reason = reason
        self._stir()
        # A request without a hint, of which nothing was found, is every new prompt: nothing to tell.
        if self._account.source or self._account.own:
            self._desk.log.add(self._account, self._steps, outcome, reason, loaded, copy_s)

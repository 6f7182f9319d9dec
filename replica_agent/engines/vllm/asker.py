"""Asks the agent for the blocks that follow what an engine holds, so that its scheduler never waits for a socket."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.hint import Hint
from replica_agent.engines.courses import POLL_S, WAIT_S
from replica_agent.engines.defects import Defects
from replica_agent.engines.errors import PoolGone
from replica_agent.engines.pool_client import PoolClient
from replica_agent.engines.pool_link import PoolLink
from replica_agent.engines.question import Question

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How often an idle asker looks whether the engine's cache was reset."""


class Search:
    """One question: which of `keys`, that follow the first `cached` blocks of a prompt of `tokens` tokens, are there?

    Made and read by the scheduler's thread; the asking thread writes `until` and then `found`, once. `found` is None
    while undecided, which is waited for until `until`; after that, `found` blocks are ready, or given up, by `until`.
    """

    def __init__(
        self,
        name: str,
        keys: Sequence[bytes],
        cached: int,
        tokens: int,
        hint: Hint | None,
        client: PoolClient,
        until: float,
    ) -> None:
        self.name = name
        self.keys = keys
        self.cached = cached
        self.client = client
        self.question = Question(client, name, keys, cached, tokens, hint)
        self.found: int | None = None
        self.until = until
        self.decided = threading.Event()

    def decide(self, found: int, until: float) -> None:
        """The answer."""
        self.until = until
        self.found = found
        self.decided.set()


class Asker:
    """Owns the searches that are not over, and the thread that asks about them; the scheduler's thread calls it, and
    never waits.

    A search is the scheduler's own to end: by `cancel`, or by `forget` once the ranks have taken it over. One that has
    found nothing is over by itself, and so is one that could not be asked about, whatever was raised. In between, the
    thread tells the agent when the engine's cache has been dropped: `clears` says how often.
    """

    def __init__(self, link: PoolLink, clears: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self.cleared = 0
        """The last clear that the agent knows of."""
        self._link = link
        self._clears = clears
        self._clock = clock
        self._searches: list[Search] = []
        self._cancelled: list[Search] = []
        self._defects = Defects(_log)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-ask", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Searches that are not over."""
        return len(self._searches)

    def ask(self, search: Search) -> None:
        """Begin a search."""
        with self._changed:
            self._searches.append(search)
            self._changed.notify()

    def cancel(self, search: Search) -> None:
        """It is not wanted any more."""
        with self._changed:
            if search in self._searches:
                self._searches.remove(search)
                self._cancelled.append(search)
                self._changed.notify()

    def forget(self, search: Search) -> None:
        """Others end it from now on."""
        with self._changed:
            if search in self._searches:
                self._searches.remove(search)

    def close(self) -> None:
        """End the thread; what is undecided stays so. The link has been closed, so it waits for no answer."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Waits with no search in a local variable: its client would keep the memory of an agent that has gone.
        while self._advance(*self._due()):
            pass

    def _due(self) -> tuple[bool, list[Search], list[Search]]:
        """Whether to go on, what to cancel and what to ask about."""
        with self._changed:
            while not self._closing:
                open_ = [search for search in self._searches if search.found is None]
                if open_ or self._cancelled or self._clears() != self.cleared:
                    cancelled, self._cancelled = self._cancelled, []
                    return True, cancelled, open_
                self._changed.wait(_LOOK_S)
            return False, [], []

    def _advance(self, on: bool, cancelled: Sequence[Search], searches: Sequence[Search]) -> bool:
        if not on:
            return False
        for search in cancelled:
            if search.found:
                # Released and not cancelled, so that the agent does not keep what a rank might still be copying.
                self._tell(search.client.release, search.name, 0, 0.0)
            else:
                self._tell(search.question.cancel)
        if (clears := self._clears()) != self.cleared:
            client = self._link.client
            if client is not None and self._tell(client.clear):
                self.cleared = clears
        alone = len(searches) == 1
        for search in searches:
            self._ask(search, WAIT_S if alone else 0.0)
        if not alone or self.cleared != clears:
            with self._changed:
                if not self._closing:
                    self._changed.wait(POLL_S if searches else _LOOK_S)
        return True

    def _ask(self, search: Search, wait_s: float) -> None:
        try:
            decision = search.question.ask(wait_s)
        except PoolGone as error:
            _log.debug("request %s: %s", search.name, error)
            decision = 0, 0.0
        except Exception:
            self._defects.note(f"request {search.name}: nothing can be asked for")
            self._tell(search.question.cancel)
            decision = 0, 0.0
        if decision is not None:
            found, seconds = decision
            search.decide(found, self._clock() + seconds)
            if not found:
                self.forget(search)

    def _tell(self, verb: Callable[..., object], *arguments: object) -> bool:
        try:
            verb(*arguments)
        except PoolGone as error:
            _log.debug("%s", error)
            return False
        except Exception:
            self._defects.note("the agent could not be told")
            return False
        return True

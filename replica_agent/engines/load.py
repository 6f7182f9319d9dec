"""One request's way from the agent's slots into its engine's blocks: asked for, copied as they arrive, given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore import engine_messages as wire
from replica_agent.engines.pool_client import PoolClient

LOOK_S = 50e-6
LOOK_LATER_S = 0.002
"""Between two looks at the board, from a load that was just fed to one that has been waiting."""

DOUBT_S = 0.01
"""So long after the last block arrived, the agent is asked whether there is more to come."""

Write = Callable[[int, memoryview], bool]
"""Copies a slot to the request's block of this number; False when that is not wanted any more, or came too late."""


class Load:
    """What one rank copies of the blocks that its engine was told to expect (`Accepted`); used by one thread.

    Blocks are copied as soon as their bytes are verified, while later ones are still on their way. None of them counts
    before the agent has confirmed it: `loaded` is 0 until then. The agent keeps the slots until `leave`, which is
    called exactly once, whatever happened. Every method raises PoolGone where `PoolClient` does; nothing of the load
    counts then, except what was `loaded` before.
    """

    def __init__(
        self,
        client: PoolClient,
        request: str,
        write: Write,
        *,
        skip: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of the blocks accepted, the first `skip` are not needed, and the `count` after them are block 0, 1, ..."""
        self._client = client
        self._request = request
        self._write = write
        self._skip = skip
        self._count = count
        self._clock = clock
        self._told = wire.Loading()
        self._slots: Sequence[int] = ()
        self._copied = 0
        self._confirmed: int | None = None
        self._fed = self._asked = clock()
        self._copy_s = 0.0

    @property
    def loaded(self) -> int:
        """Blocks, from the first on, that are copied and confirmed."""
        return min(self._copied, self._usable(self._confirmed or 0))

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before more has arrived, or the agent has said something."""
        return self._confirmed is None and self._copied >= self._usable(self._arrived)

    @property
    def done(self) -> bool:
        """Whether all that the agent could get is loaded."""
        return self._confirmed is not None and self._copied >= self._usable(self._confirmed)

    def wait(self, seconds: float = 0.0) -> None:
        """Until more has arrived, or the agent says that it is confirmed, or will not be; for `seconds` at most."""
        if not self._slots:
            self._ask()
        elif self._told.cell < 0 or self._copied >= self._usable(len(self._slots)):
            self._ask(seconds)
        else:
            self._look(seconds)

    @property
    def _arrived(self) -> int:
        told = self._told
        if told.cell < 0:
            return told.there
        return min(told.there + max(0, self._client.arrived(told.cell) - told.before), len(told.slots))

    def _look(self, seconds: float) -> None:
        """At the board, less and less often while nothing comes. It does not say that the fetch has failed, so after a
        while the agent is asked."""
        began = now = self._clock()
        before = self._arrived
        while now < began + seconds and self._arrived == before:
            time.sleep(min(max(LOOK_S, (now - self._fed) / 4), LOOK_LATER_S))
            now = self._clock()
        if self._arrived > before:
            self._fed = now
        elif now >= max(self._fed, self._asked) + DOUBT_S:
            self._ask()

    def _ask(self, wait_s: float = 0.0) -> None:
        answer = self._client.poll(self._request, wait_s)
        self._asked = self._clock()
        match answer:
            case wire.Loading():
                self._told = answer
                self._slots = answer.slots
            case wire.Ready():
                self._slots = answer.slots
                self._confirmed = len(answer.slots)
            case wire.Nothing():
                self._confirmed = 0

    def copy(self, most: int) -> bool:
        """Copy up to `most` blocks that are there. False when the first of them was not wanted."""
        there = self._usable(self._arrived if self._confirmed is None else self._confirmed)
        began = self._clock()
        try:
            for number in range(self._copied, min(there, self._copied + most)):
                if not self._write(number, self._client.slot(self._slots[self._skip + number])):
                    return False
                self._copied += 1
            return True
        finally:
            self._copy_s += self._clock() - began

    def leave(self, loaded: int | None = None) -> None:
        """Give the slots back. `loaded` blocks were of use, where that is less than were loaded."""
        if self._confirmed is None:
            self._client.cancel(self._request)
        elif self._confirmed:
            self._client.release(self._request, self.loaded if loaded is None else loaded, self._copy_s)

    def _usable(self, slots: int) -> int:
        return max(0, min(slots - self._skip, self._count))

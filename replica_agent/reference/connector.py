"""The seam between the scheduler and whatever keeps blocks outside the engine's own cache."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.engine_messages import DECISION_S
from kvstore.hint import Hint
from replica_agent.reference.block_pool import CachedBlock


class Saving(NamedTuple):
    """A run of consecutive blocks of one sequence that has just been computed, to be copied away.

    `versions` are the blocks' in the `BlockPool`: a block whose version has changed holds something else by now.
    """

    blocks: Sequence[int]
    versions: Sequence[int]
    contents: Sequence[CachedBlock]


class Search:
    """One sequence's search for the blocks that follow its first `cached` ones, and their way into the engine.

    The compute thread makes it, reads it, calls `load` once blocks are found and there is room, and `end` exactly when
    it needs it no more; the connector's thread calls `accept`, `copy`, `confirm` and `finish`. `found` is None while
    undecided, 0 when there is nothing to wait for. What is not `done` by `deadline` is to be ended: neither an agent
    nor a thread that hangs can keep a sequence.
    """

    def __init__(
        self,
        request: str,
        keys: Sequence[bytes],
        cached: int,
        tokens: int,
        hint: Hint | None,
        clock: Callable[[], float],
    ) -> None:
        """`tokens` is the prompt's length; `clock` the scheduler's, by which all times are."""
        self.request = request
        self.keys = keys
        self.cached = cached
        self.tokens = tokens
        self.hint = hint
        self.deadline = clock() + DECISION_S
        self.found: int | None = None
        self.done = False
        self.ended = False
        self.blocks: Sequence[int] | None = None
        """Where to copy the found blocks; None until `load`."""
        self.skip = 0
        """Found blocks that are not wanted any more, because the engine has got them in the meantime."""
        self.loaded = 0
        """How many of `blocks`, from the first on, are copied and good."""
        self._clock = clock
        self._lock = threading.Lock()

    def load(self, table: Sequence[int], cached: int) -> bool:
        """Have the found blocks copied into `table`, of which the first `cached` are in the cache already.

        False, and nothing is copied, when they do not follow on or bring nothing new.
        """
        found = self.found or 0
        if not self.cached <= cached < self.cached + found:
            return False
        self.skip = cached - self.cached
        self.blocks = table[cached : self.cached + found]
        return True

    def end(self) -> int:
        """From now on no block is written. Returns how many of `blocks`, from the first on, are there. Idempotent.

        Waits for the block that is being copied, if one is: a fraction of a millisecond.
        """
        with self._lock:
            self.ended = True
            return self.loaded

    def accept(self, found: int, deadline: float) -> None:
        """`found` blocks will be ready, or given up, by `deadline`."""
        self.deadline = deadline
        self.found = found

    def copy(self, number: int, write: Callable[[int], None]) -> bool:
        """Copy to `blocks[number]`: `write(block)`. False when the search has been ended, or its deadline is over."""
        assert self.blocks is not None
        with self._lock:
            if self.ended:
                return False
            write(self.blocks[number])
            # After the copy: an engine that was frozen in it may have copied what the slot was given to meanwhile. The
            # agent keeps a slot for longer than the deadline, but not for ever.
            return self._clock() < self.deadline

    def confirm(self, loaded: int) -> None:
        """The first `loaded` of `blocks` are copied, and are what was asked for."""
        with self._lock:
            if not self.ended:
                self.loaded = loaded

    def finish(self) -> None:
        """Nothing more will come."""
        if self.found is None:
            self.found = 0
        self.done = True


class Connector(ABC):
    """Finds and keeps blocks. Called by the compute thread alone; no method waits for anything."""

    @abstractmethod
    def seek(self, request: str, keys: Sequence[bytes], cached: int, tokens: int, hint: Hint | None) -> Search | None:
        """Begin to search for `keys`, which follow the first `cached` blocks of a prompt of `tokens` tokens.

        None when there is nobody to ask.
        """

    @abstractmethod
    def settle(self) -> None:
        """A search has been ended, or given blocks to load into: look at them again."""

    @abstractmethod
    def save(self, saving: Saving) -> None:
        """Copy blocks away, as long as they hold what they hold now."""

    @abstractmethod
    def clear(self) -> None:
        """Nothing saved before may be found any more; nothing is sought until that is sure."""

    @abstractmethod
    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """A step that was nearly all prefill computed `tokens` that attended to `attended` positions in sum."""

"""In-flight accounting of one replica: the only code that touches its load counters."""

from __future__ import annotations

from collections.abc import Callable


class InFlight:
    """Requests placed on one replica and not finished.

    `prefill_tokens` is in tokens at a prompt's beginning (`gateway.placement.placement.effort`).
    Owns two counters; only a `Ticket` changes them, each ticket at most once per step, so they return to zero and never
    pass below it whatever way a request ends. `check()` states the law. `on_change` is called after every change.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self.prefill_tokens = 0
        self.on_change: Callable[[], None] = _tell_nobody

    def admit(self, prefill_tokens: int) -> Ticket:
        """Count one request with this many uncached prompt tokens until its ticket is finished."""
        return Ticket(self, prefill_tokens)

    def check(self) -> None:
        """The counters are sums over open tickets: never negative, and no tokens without a sequence."""
        assert self.sequences >= 0 and self.prefill_tokens >= 0, (self.sequences, self.prefill_tokens)
        assert self.sequences > 0 or self.prefill_tokens == 0, (self.sequences, self.prefill_tokens)


class Ticket:
    """One request's share of a replica's load. Every method may be called again without effect."""

    __slots__ = ("_load", "_open", "_tokens")

    def __init__(self, load: InFlight, tokens: int) -> None:
        self._load = load
        self._tokens = tokens
        self._open = True
        load.sequences += 1
        load.prefill_tokens += tokens
        load.on_change()

    def prefilled(self) -> None:
        """The first token arrived: its prefill is queued no more."""
        if self._tokens:
            self._load.prefill_tokens -= self._tokens
            self._tokens = 0
            self._load.on_change()

    def finish(self) -> None:
        """The request is over, however it ended."""
        if self._open:
            self._open = False
            self._load.prefill_tokens -= self._tokens
            self._tokens = 0
            self._load.sequences -= 1
            self._load.on_change()


def _tell_nobody() -> None:
    pass

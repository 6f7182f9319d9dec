"""Notices a prefix cache that was emptied on an engine with nothing to do."""

from __future__ import annotations

from replica_agent.load import EngineMetrics


class ResetWatch:
    """Tells from one look at `/metrics` after another when the cache was cleared and no KV event says so yet.

    vLLM publishes what a step did with that step, so an idle engine that was told to reset its prefix cache announces
    it only with its next request; until then every block would be credited. Its metrics count that call at once.

    Owns what the last look showed; one watch for one life of an engine. To clear too much is worse than to clear late:
    a block is stored again only after its eviction, while a late clear costs the prediction of one request. So a reset
    counts only when the next look finds the engine as idle as before, nothing prefilled in between, and no event has
    told it. A busy engine tells itself, and refuses a reset while blocks are in use.
    """

    def __init__(self) -> None:
        self._last: EngineMetrics | None = None
        self._announced = False
        self._due = False

    def announced(self) -> None:
        """An event said that everything was cleared."""
        self._announced = True
        self._due = False

    def check(self) -> None:
        """Asserts that what an event has told is not told again."""
        assert not (self._announced and self._due)

    def look(self, metrics: EngineMetrics) -> bool:
        """Whether everything held so far is to be forgotten now. `metrics` are of the process looked at last, too."""
        last, self._last = self._last, metrics
        announced, self._announced = self._announced, False
        if last is None:
            return False
        idle = metrics.running == metrics.waiting == 0
        unused = metrics.prompt_tokens is not None and metrics.prompt_tokens == last.prompt_tokens
        cleared = self._due and idle and unused
        self._due = idle and not announced and metrics.resets > last.resets
        return cleared

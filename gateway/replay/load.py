"""What simulated replicas have to do."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple


class Task(NamedTuple):
    """One request on a replica: `new` uncached of `context` prompt tokens, and when its prefill and all of it end."""

    replica: int
    prefill_end: float
    new: int
    context: int
    end: float


class Load:
    """Requests that replicas have not finished, by what they wait for: their prefill, or their last token.

    Owns, for each replica, how many are `outstanding` and their `context` in tokens, the uncached tokens of those whose
    prefill has not ended (`queued_tokens`), and the count and context of those that decode. True for the time of the
    last `advance`; times never go back.
    """

    def __init__(self, replicas: int) -> None:
        self.outstanding = [0] * replicas
        self.context = [0] * replicas
        self.queued_tokens = [0] * replicas
        self.decoding = [0] * replicas
        self.decoding_context = [0] * replicas
        self._prefills: list[list[tuple[float, int, int, float]]] = [[] for _ in range(replicas)]
        self._decodes: list[list[tuple[float, int]]] = [[] for _ in range(replicas)]
        self._announced: deque[tuple[float, Task]] = deque()

    def add(self, task: Task) -> None:
        """A request was placed."""
        replica, prefill_end, new, context, end = task
        heappush(self._prefills[replica], (prefill_end, new, context, end))
        self.outstanding[replica] += 1
        self.context[replica] += context
        self.queued_tokens[replica] += new

    def add_later(self, at: float, task: Task) -> None:
        """As `add`, once `advance` reaches `at`; calls are in the order of `at`."""
        self._announced.append((at, task))

    def advance(self, now: float) -> None:
        """Everything that has happened by `now`."""
        announced = self._announced
        while announced and announced[0][0] <= now:
            self.add(announced.popleft()[1])
        for replica, prefills in enumerate(self._prefills):
            decodes = self._decodes[replica]
            while prefills and prefills[0][0] <= now:
                _, new, context, end = heappop(prefills)
                self.queued_tokens[replica] -= new
                self.decoding[replica] += 1
                self.decoding_context[replica] += context
                heappush(decodes, (end, context))
            while decodes and decodes[0][0] <= now:
                _, context = heappop(decodes)
                self.outstanding[replica] -= 1
                self.context[replica] -= context
                self.decoding[replica] -= 1
                self.decoding_context[replica] -= context

    def check(self) -> None:
        """Asserts that the counters are sums over the requests that wait."""
        for replica, prefills in enumerate(self._prefills):
            decodes = self._decodes[replica]
            assert self.outstanding[replica] == len(prefills) + len(decodes)
            assert self.queued_tokens[replica] == sum(new for _, new, _, _ in prefills)
            assert self.decoding[replica] == len(decodes)
            assert self.decoding_context[replica] == sum(context for _, context in decodes)
            waiting = sum(context for _, _, context, _ in prefills)
            assert self.context[replica] == waiting + self.decoding_context[replica]

"""What fetching and recomputing are expected to take, from what they took before, and which of them to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from kvstore.cost import LinkEstimate, PrefillEstimator, decide
from replica_agent.kv.link import Link

LINK_PRIOR = LinkEstimate(latency_s=0.003, bytes_per_s=1e9)
"""A link nothing was fetched over: three HTTP exchanges, as between hosts, and a tenth of what links between replicas
carry. Argued, not measured; too low costs a few fetches that would have paid, and is over after the first that do."""

COPY_PRIOR = LinkEstimate(latency_s=0.0005, bytes_per_s=5e9)
"""Slots to paged blocks, before the engine has told: a memcpy on a busy host."""

PREFILL_PRIOR = 8_000.0
"""Tokens/s of an engine that has not told of a prefill yet: that of an 8B model on one large GPU, the order of it."""

TRUSTED_AFTER = 3
"""Prefills after which the fitted speed is told to gateways."""

TYPICAL_PREFILL = 1_024
"""Tokens of the prefill whose speed is told: long enough that the fixed part of a step does not decide it."""

_MAX_LINKS = 1_024


class Prompt(NamedTuple):
    """A prompt as its engine asks for it: `tokens`, of which the first `cached_blocks` blocks are in the engine."""

    tokens: int
    cached_blocks: int
    block_tokens: int
    block_bytes: int

    def rest(self, blocks: int) -> tuple[int, int]:
        """Tokens to compute, and those before them, when `blocks` more blocks are there. The last token always is."""
        context = min((self.cached_blocks + blocks) * self.block_tokens, max(0, self.tokens - 1))
        return self.tokens - context, context


class Prediction(NamedTuple):
    """Seconds: getting the blocks into the engine, computing what remains then, and computing everything instead."""

    fetch_s: float
    rest_s: float
    recompute_s: float


class Estimates:
    """Owns the fitted figures of one agent: its engine's prefill, the copy between slots and paged blocks, and the way
    to each replica. Told by whoever measured; used on one event loop; a prediction is valid until the next one tells.

    A replica nothing was fetched from lately is expected to be like the others; one from which fetches fail at once,
    to bring nothing for a while.
    """

    def __init__(self, *, margin: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._margin = margin
        self._clock = clock
        self._prefill = PrefillEstimator(PREFILL_PRIOR)
        self._prefills = 0
        self._copy = Link(COPY_PRIOR)
        self._any = Link(LINK_PRIOR)
        self._links: dict[str, Link] = {}

    def prefilled(self, tokens: int, attended: int, seconds: float) -> None:
        """The engine computed `tokens`, which attended to `attended` positions in sum, in `seconds`."""
        self._prefill.observe(tokens, attended, seconds)
        self._prefills += 1

    def copied(self, size: int, seconds: float) -> None:
        """The engine copied `size` bytes from slots to its blocks."""
        self._copy.observe(size, seconds, self._clock(), COPY_PRIOR)

    def fetched(self, source: str, size: int, seconds: float) -> None:
        """`size` bytes came from `source`, from asking for the lease to the owner's word that it held."""
        now, like_others = self._clock(), self.link
        self._link_to(source).observe(size, seconds, now, like_others)
        self._any.observe(size, seconds, now, LINK_PRIOR)

    def failed(self, source: str, began: float) -> None:
        """A fetch from `source` that `began` then brought nothing, and took less time than bringing it would have."""
        self._link_to(source).failed(began, self._clock())

    def held_back(self, source: str) -> bool:
        """Whether the last fetches from `source` failed at once, so that nothing is expected of it now."""
        link = self._links.get(source)
        return link is not None and link.held_back(self._clock())

    def _link_to(self, source: str) -> Link:
        """What is told of is the last to be forgotten."""
        link = self._links.pop(source, None) or Link(self.link)
        self._links[source] = link
        while len(self._links) > _MAX_LINKS:
            del self._links[next(iter(self._links))]
        return link

    def predict(self, prompt: Prompt, own: int, remote: int, source: str) -> Prediction:
        """For `own` blocks out of the agent's pool and then `remote` ones from `source`."""
        moved = self.moving(source, remote * prompt.block_bytes) if remote else 0.0
        copied = 0.0
        if own + remote:
            copied = self._copy.estimate(self._clock()).seconds((own + remote) * prompt.block_bytes)
        return Prediction(
            moved + copied,
            self._prefill.seconds(*prompt.rest(own + remote)),
            self._prefill.seconds(*prompt.rest(0)),
        )

    def moving(self, source: str, size: int) -> float:
        """Seconds in which `size` bytes are expected to come from `source`."""
        now, link = self._clock(), self._links.get(source)
        return (link if link is not None and link.known(now) else self._any).estimate(now).seconds(size)

    def worth_copying(self, prompt: Prompt, own: int) -> bool:
        """Whether to use `own` blocks out of the agent's pool."""
        expected = self.predict(prompt, own, 0, "")
        return decide(expected.fetch_s, expected.rest_s, expected.recompute_s, self._margin)

    def worth_fetching(self, prompt: Prompt, own: int, remote: int, source: str) -> bool:
        """Whether to fetch `remote` blocks, where the alternative is to use `own` ones and compute the rest."""
        expected, without = self.predict(prompt, own, remote, source), self.predict(prompt, own, 0, "")
        return decide(expected.fetch_s, expected.rest_s, without.fetch_s + without.rest_s, self._margin)

    def worth_waiting(self, prompt: Prompt, own: int, remote: int, left_s: float) -> bool:
        """Whether to wait `left_s` for `remote` blocks that come anyway, or to use `own` ones and compute the rest."""
        expected, without = self.predict(prompt, own + remote, 0, ""), self.predict(prompt, own, 0, "")
        return decide(left_s + expected.fetch_s, expected.rest_s, without.fetch_s + without.rest_s, self._margin)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's speed, None until it is known."""
        return self._prefill.tokens_per_s(TYPICAL_PREFILL) if self._prefills >= TRUSTED_AFTER else None

    @property
    def link(self) -> LinkEstimate:
        """What is assumed of a replica nothing was fetched from lately."""
        return self._any.estimate(self._clock())

    @property
    def links(self) -> dict[str, LinkEstimate]:
        """What is known of each other one."""
        now = self._clock()
        return {source: link.estimate(now) for source, link in self._links.items() if link.known(now)}

    def check(self) -> None:
        """Asserts that there are no more links than allowed, and that every estimator is sound."""
        assert len(self._links) <= _MAX_LINKS
        self._prefill.check()
        for link in (self._copy, self._any, *self._links.values()):
            link.check()

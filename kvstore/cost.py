"""What moving and recomputing KV costs, in seconds: formulas, and estimators fitted to what was measured.

Nothing here reads a clock: whoever moves or computes measures, and tells the estimator.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.bounds import Rate
from kvstore.fit import DurationFit

_FASTEST = 1e15
"""Bytes per second and tokens per second above which no estimate goes, so that a quotient stays finite."""


class LinkEstimate(msgspec.Struct, frozen=True):
    """A path between two memories: seconds before the first byte, and bytes per second after it."""

    latency_s: Annotated[float, Meta(ge=0, le=1e12)]
    bytes_per_s: Rate

    def seconds(self, size: float) -> float:
        """What moving `size` bytes takes."""
        return transfer_seconds(size, self.latency_s, self.bytes_per_s)


def transfer_seconds(size: float, latency_s: float, bytes_per_s: float) -> float:
    """What moving `size` bytes takes: the latency once, and the bytes at the link's rate."""
    return latency_s + size / bytes_per_s


def attended(tokens: int, context: int = 0, window: int = 0) -> int:
    """Positions that `tokens` new tokens after `context` cached ones attend to, in sum; each attends to itself, too.

    With a `window` above 0 each looks back over that many positions at most, itself included.
    """
    growing = tokens if not window else min(max(window - context, 0), tokens)
    return context * growing + growing * (growing + 1) // 2 + (tokens - growing) * window


def decide(fetch_s: float, rest_s: float, recompute_s: float, margin: float) -> bool:
    """Whether to fetch: only where fetching, and computing what is left, beats computing all by a share of `margin`."""
    return fetch_s + rest_s < (1 - margin) * recompute_s


class LinkEstimator:
    """Latency and bandwidth of one path, from transfers of known size (`DurationFit` says how)."""

    def __init__(self, prior: LinkEstimate) -> None:
        """`prior` stands until the first transfer, and is worth a few of them."""
        coefficients = (prior.latency_s, 1 / min(prior.bytes_per_s, _FASTEST))
        self._fit = DurationFit(coefficients, (max(prior.latency_s, 1e-6), coefficients[1]))

    def observe(self, size: float, seconds: float) -> None:
        """A transfer of `size` bytes took `seconds`; what cannot be one is ignored."""
        self._fit.observe((1.0, size), seconds)

    def expects(self, size: float, seconds: float) -> bool:
        """Whether `seconds` for `size` bytes would be no surprise."""
        return self._fit.expects((1.0, size), seconds)

    @property
    def estimate(self) -> LinkEstimate:
        """The path as known now."""
        latency_s, per_byte = self._fit.coefficients
        return LinkEstimate(latency_s, 1 / max(per_byte, 1 / _FASTEST))

    def check(self) -> None:
        """See `DurationFit.check`."""
        self._fit.check()


class PrefillEstimator:
    """Time of a prefill step: fixed + a x tokens + b x positions attended to (`DurationFit` says how)."""

    def __init__(self, prior_tokens_per_s: float) -> None:
        """The prior is a constant speed; it stands until the first step, and is worth a few of them."""
        per_token = 1 / min(prior_tokens_per_s, _FASTEST)
        # Scales: a millisecond to start, and attention that weighs as much as the rest at a context of 4,096.
        self._fit = DurationFit((0.0, per_token, 0.0), (1e-3, per_token, per_token / 4_096))

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """A step took `seconds` for `tokens` that attended to `attended` positions in sum; nonsense is ignored."""
        self._fit.observe((1.0, tokens, attended), seconds)

    def seconds(self, tokens: int, context: int = 0) -> float:
        """What computing `tokens` after `context` cached ones is expected to take."""
        return self._fit.predict((1.0, tokens, attended(tokens, context)))

    def tokens_per_s(self, tokens: int, context: int = 0) -> float:
        """The speed at this length."""
        return tokens / max(self.seconds(tokens, context), 1 / _FASTEST)

    def check(self) -> None:
        """See `DurationFit.check`."""
        self._fit.check()

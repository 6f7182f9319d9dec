"""The ways of placing requests by the names they have on the command line."""

from __future__ import annotations

from collections.abc import Callable

from gateway.errors import SettingsError
from gateway.replay import published
from gateway.replay.fleet import Fleet
from gateway.replay.ours import Ours
from gateway.replay.policy import Policy

Maker = Callable[[Fleet], Policy]

PLAIN: dict[str, type[Policy]] = {
    "ours": Ours,
    "round-robin": published.RoundRobin,
    "random": published.Random,
    "least-loaded": published.LeastLoaded,
    "session-hash": published.SessionHash,
    "first-block-hash": published.FirstBlockHash,
    "longest-match": published.LongestMatch,
    "prefill-decode-blocks": published.PrefillDecodeBlocks,
    "lmetric": published.LMetric,
    "one-big-cache": published.OneBigCache,
}
"""An experiment may put one of its own here."""

_NUMBERED: dict[str, Callable[[Fleet, int], Policy]] = {"chwbl": published.BoundedHash, "ttft": published.Ttft}

NAMES = (
    "ours",
    "round-robin",
    "random",
    "least-loaded",
    "session-hash",
    "first-block-hash",
    "chwbl@4",
    "longest-match",
    "prefill-decode-blocks",
    "lmetric",
    "ttft@4",
    "one-big-cache",
)
"""All of them, in the order of the table; `chwbl` and `ttft` take any whole number."""


def policy(name: str) -> Maker:
    """What makes the policy of this name. Raises SettingsError that names the flag."""
    if name in PLAIN:
        return PLAIN[name]
    kind, _, number = name.partition("@")
    if kind in _NUMBERED and number.isdecimal() and 0 < int(number) <= 1_000_000:
        numbered = _NUMBERED[kind]
        return lambda fleet: numbered(fleet, int(number))
    raise SettingsError(f"--policy: {name!r} is not one of all, {', '.join(NAMES)}")

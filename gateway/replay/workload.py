"""A trace as it is replayed: prompts as chains of numbered blocks, times from zero, sessions, and who follows whom."""

from __future__ import annotations

import random
import statistics
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby, pairwise

import msgspec

from gateway.errors import TraceError
from gateway.replay.hashing import stable_hash
from gateway.replay.rows import Row, Rows, Turn, expand

COARSE_TOKENS = 512
"""Finer blocks are merged to this: what a replay says does not change, and it is many times faster."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of time; every list but `parents` has one entry a request. Never changed once made.

    `chains` are block numbers, `block` the tokens of each, and `parents` gives the block before each, -1 for the first
    of a prompt: a number stands for the whole prefix up to it. `follows[i]` is the next request of i's session, -1 for
    the last, where the trace has the gaps between them (`closed`: a request is sent `gaps_s` after the answer before
    it); `starts` are the requests that wait for none.
    """

    block: int
    parents: list[int]
    times: list[float]
    tokens: list[int]
    outputs: list[int]
    sessions: list[Hashable]
    chains: list[tuple[int, ...]]
    gaps_s: list[float]
    follows: list[int]
    starts: list[int]
    closed: bool
    live: bool
    assumed: int

    def __len__(self) -> int:
        return len(self.times)


def build(rows: Rows, *, sessions: int = 0, spread: bool = False, seed: int = 0) -> Workload:
    """A workload of all requests, or with `sessions` of a sample of that many whole sessions (0: all).

    With `spread` the requests that a coarse clock put at one instant are spread over its tick. Raises TraceError when
    there are no sessions to sample from.
    """
    found = _with_sessions(sorted(rows.rows, key=lambda row: row.at))
    if sessions:
        found = _sample(found, sessions, seed)
    known = found[0].session is not None
    merge = max(1, COARSE_TOKENS // rows.block)
    chains, parents = _chains(found, merge)
    times = [row.at - found[0].at for row in found]
    if spread:
        times = spread_ticks(times, seed)
    names = [row.session for row in found] if known else infer_sessions(chains)
    closed = any(row.gap_s is not None for row in found)
    follows = _followers(names) if closed else [-1] * len(found)
    waiting = set(follows)
    return Workload(
        block=rows.block * merge,
        parents=parents,
        times=times,
        tokens=[row.tokens for row in found],
        outputs=[row.output for row in found],
        sessions=names,
        chains=chains,
        gaps_s=[row.gap_s or 0.0 for row in found],
        follows=follows,
        starts=[i for i in range(len(found)) if i not in waiting],
        closed=closed,
        live=rows.live,
        assumed=rows.assumed,
    )


def infer_sessions(chains: Sequence[Sequence[int]]) -> list[Hashable]:
    """Sessions of requests that name none, as the number of the first request of each.

    A request continues the one that first had its deepest known block if it repeats all of that one's blocks but the
    last, and at least two; otherwise it begins a session.
    """
    owner: dict[int, int] = {}
    sessions: list[Hashable] = []
    for i, chain in enumerate(chains):
        known = 0
        for block in chain:
            if block not in owner:
                break
            known += 1
        session: Hashable = i
        if known:
            before = owner[chain[known - 1]]
            if known >= max(2, len(chains[before]) - 1):
                session = sessions[before]
        for block in chain[known:]:
            owner[block] = i
        sessions.append(session)
    return sessions


def spread_ticks(times: Sequence[float], seed: int) -> list[float]:
    """Ascending `times` with those that share an instant spread, in their order, over the clock's tick.

    The tick is the median distance between instants. Times that are all different stay as they are.
    """
    instants = sorted(set(times))
    if len(instants) in (1, len(times)):
        return list(times)
    tick = statistics.median(after - before for before, after in pairwise(instants))
    rng = random.Random(seed)
    spread: list[float] = []
    for instant, group in groupby(times):
        spread += sorted(instant + tick * rng.random() for _ in group)
    return sorted(spread)


def _with_sessions(rows: list[Row]) -> list[Row]:
    """The same rows, with the chat that a chain of turns began with as the session of each."""
    if not isinstance(rows[0].session, Turn):
        return rows
    roots: dict[str | int | None, str | int | None] = {}
    named = []
    for row in rows:
        turn = row.session
        if isinstance(turn, Turn):
            roots[turn.chat] = roots.get(turn.parent, turn.chat)
            row = row._replace(session=roots[turn.chat])
        named.append(row)
    return named


def _sample(rows: list[Row], sessions: int, seed: int) -> list[Row]:
    """Those of `sessions` sessions, chosen by a hash of their names and the seed."""
    names = {row.session for row in rows}
    if names == {None}:
        raise TraceError("--sessions-per-replica: the trace does not name its sessions")
    salt = (seed,) if seed else ()
    kept = set(sorted(names, key=lambda name: stable_hash(("s", name, *salt)))[:sessions])
    return [row for row in rows if row.session in kept]


def _chains(rows: Sequence[Row], merge: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Numbers every prefix that ends a block of `merge` recorded ones, in the order in which they are first met."""
    numbers: dict[tuple[int, bytes], int] = {}
    parents: list[int] = []
    return [tuple(_walk(numbers, parents, row, merge)) for row in rows], parents


def _walk(numbers: dict[tuple[int, bytes], int], parents: list[int], row: Row, merge: int) -> Iterator[int]:
    packed = expand(row.ids).tobytes()
    width = 8 * merge
    at = -1
    for start in range(0, len(packed) // width * width, width):
        key = (at, packed[start : start + width])
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(parents)
            parents.append(at)
        at = number
        yield number


def _followers(sessions: Sequence[Hashable]) -> list[int]:
    follows = [-1] * len(sessions)
    last: dict[Hashable, int] = {}
    for i, session in enumerate(sessions):
        if session in last:
            follows[last[session]] = i
        last[session] = i
    return follows

"""What every trace format is read into."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple


class Row(NamedTuple):
    """One recorded request. Seconds and tokens.

    `ids` names the prompt's blocks in order, by content or as whole prefixes: a block's identity is the chain of ids up
    to it. `session` is None where the trace does not say. `gap_s` is the time between the end of the answer before it
    in its session and this request; where a trace has gaps, a slow answer delays what follows it.
    """

    at: float
    tokens: int
    output: int
    session: Hashable
    ids: array[int] | Runs
    gap_s: float | None = None


class Runs(tuple[tuple[int, int], ...]):
    """Block ids as (first, count). Prompts of a session repeat long runs, which take no memory this way."""

    __slots__ = ()


class Turn(NamedTuple):
    """The session of a request that only names the one it continues: known once all requests are."""

    chat: str | int
    parent: str | int | None


class Rows(NamedTuple):
    """A trace as recorded: requests in the order of the file, and the tokens of a block.

    `live` says that the times are those of real traffic, to be kept unless another load is asked for. `assumed` counts
    requests that say nothing of their output.
    """

    rows: list[Row]
    block: int
    live: bool = False
    assumed: int = 0


def expand(ids: array[int] | Runs) -> array[int]:
    """The block ids one by one."""
    if not isinstance(ids, Runs):
        return ids
    out = array("Q")
    for first, count in ids:
        out.extend(range(first, first + count))
    return out


def block_count(ids: array[int] | Runs) -> int:
    """How many there are."""
    return sum(count for _, count in ids) if isinstance(ids, Runs) else len(ids)

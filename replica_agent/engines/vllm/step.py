"""What the scheduler's side tells every rank with each step, and what ranks tell back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.engine_messages import EngineHello


class LoadOrder(NamedTuple):
    """Copy found blocks into `blocks`: the first `skip` found are not needed, the ones after them are these.

    `request` is vLLM's id of the request, `name` the one that the agent knows its search by. What is not there by
    `deadline` (monotonic, which all processes of a host share) is computed.
    """

    request: str
    name: str
    blocks: list[int]
    skip: int
    deadline: float


class SaveOrder(NamedTuple):
    """Consecutive blocks that are full once this step is computed; `parent` is the key before the first, or b""."""

    blocks: list[int]
    keys: list[bytes]
    parent: bytes


class Prefill(NamedTuple):
    """A step that is nearly all prefill: its tokens, and how many positions they attend to in sum."""

    tokens: int
    attended: int


@dataclass(slots=True)
class Step:
    """One step. `fresh` blocks are given out anew: what they held is overwritten from now on. `clears` counts how often
    the engine's prefix cache was dropped on purpose, so far. In an `idle` step nothing is computed."""

    fresh: list[int] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    clears: int = 0
    prefill: Prefill | None = None
    idle: bool = False


@dataclass(slots=True)
class Cleared:
    """Up to which clear of the engine each rank has told the agent, by rank."""

    ranks: dict[int, int]

    def aggregate(self, other: Cleared) -> Cleared:
        """Both; vLLM puts together what its ranks say in one step."""
        return Cleared(self.ranks | other.ranks)


@dataclass(slots=True)
class Introduction:
    """How a rank says hello to the agent, for the scheduler's side to say the same; or why it does not."""

    hello: EngineHello | None = None
    reason: str = ""

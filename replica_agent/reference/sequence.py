"""One generation: its tokens, its parameters, and how far it has been computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvstore.hint import Hint
from kvstore.identity import ROOT_BLOCK_HASH, engine_block_hash
from replica_agent.reference.block_pool import CachedBlock
from replica_agent.reference.connector import Search

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What a step added to a sequence: text that is safe to show, and how it ended if it did.

    `generated` counts all tokens generated so far, `cached` the prompt tokens that were found in the cache.
    """

    text: str
    generated: int
    cached: int
    finish: FinishReason | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's choice. Built by the server; from `Engine.submit` on, only the compute thread may touch it.

    `tokens[:computed]` have their KV in `blocks`; `blocks[:stored]` need no storing any more. A preempted sequence
    has no blocks and `computed` 0; its generated tokens are then computed again like a prompt. While `search` is set,
    blocks are sought for it outside the engine (it waits) or loaded (it runs, and is not computed).
    """

    tokens: list[int]
    params: SamplingParams
    deliver: Callable[[Output], None]
    salt: str | None = None
    request: str = ""
    """The engine's own id of the request's choice; only one with an id is sought outside the engine."""
    hint: Hint | None = None
    arrival: float = 0.0
    prompt_length: int = field(init=False)
    computed: int = 0
    stored: int = 0
    cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    generation: int = 0
    """The pool's generation at admission."""
    search: Search | None = None
    sought: bool = False
    """Whether a search has been begun since it was last queued."""
    first_token_at: float | None = None
    _contents: list[CachedBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def missing(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 when decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether only the newest generated token is to be computed."""
        return self.missing == 1 and self.generated > 0

    def contents(self, block_size: int) -> list[CachedBlock]:
        """Names of all full blocks of the tokens known so far, computed or not; each is hashed once."""
        known = self._contents
        for index in range(len(known), len(self.tokens) // block_size):
            parent = known[-1].hash if known else None
            tokens = tuple(self.tokens[index * block_size : (index + 1) * block_size])
            extra = (("cache_salt", self.salt),) if parent is None and self.salt is not None else None
            known.append(CachedBlock(engine_block_hash(parent or ROOT_BLOCK_HASH, tokens, extra), parent, tokens))
        return known

"""Prefill that other replicas had already done, as the reports tell it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.duplication.ledger import Kind
from kvstore.messages import FetchRecord

MOST_MODELS = 256


class Recomputed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model whose KV replicas reported anew in HBM, and those of them that another replica held then."""

    model: str
    stored_tokens: int
    recomputed_tokens: int


class Recompute:
    """Adds up what replicas store: blocks that they computed, and whether another replica of their kind had them.

    Routing by prefix would have saved those: this is what reports alone tell of it. What comes with a snapshot was not
    seen being computed and is not counted, so `live` says whether a replica's stream is past its snapshot. Blocks that
    an engine loaded, from its own pool or a peer's, it did not compute: the agent's records of that are taken off.

    Owns two sums per model, for as many as `MOST_MODELS`: of more, those that nobody serves any more are forgotten, for
    agents say what they are called. The ledger tells it of blocks, the report streams of fetches.
    """

    def __init__(self, live: Callable[[str], bool]) -> None:
        self._live = live
        self._models: dict[str, str] = {}
        self._stored: dict[str, int] = {}
        self._recomputed: dict[str, int] = {}

    def stored(self, replica: str, kind: Kind, blocks: int, copied: int) -> None:
        """A replica has got `blocks` in HBM, `copied` of which others of its kind had already."""
        if self._live(replica):
            if kind.model not in self._stored and len(self._stored) >= MOST_MODELS:
                self._forget()
            self._models[replica] = kind.model
            self._stored[kind.model] = self._stored.get(kind.model, 0) + blocks * kind.block_tokens
            self._recomputed[kind.model] = self._recomputed.get(kind.model, 0) + copied * kind.block_tokens

    def fetched(self, record: FetchRecord) -> None:
        """A fetch has ended: what was loaded was stored without being computed."""
        if (model := self._models.get(record.replica)) is not None:
            tokens = record.loaded * record.block_tokens
            self._stored[model] = max(0, self._stored[model] - tokens)
            self._recomputed[model] = max(0, self._recomputed[model] - tokens)

    def _forget(self) -> None:
        served = set(self._models.values())
        for model in [model for model in self._stored if model not in served]:
            del self._stored[model], self._recomputed[model]

    def check(self) -> None:
        """Asserts that no model has less than nothing, and that models and replicas agree."""
        assert self._stored.keys() == self._recomputed.keys() >= set(self._models.values())
        assert all(tokens >= 0 for sums in (self._stored, self._recomputed) for tokens in sums.values())

    def totals(self) -> list[Recomputed]:
        """Of each model, in the order of their names."""
        return [
            Recomputed(model=model, stored_tokens=stored, recomputed_tokens=min(stored, self._recomputed[model]))
            for model, stored in sorted(self._stored.items())
        ]

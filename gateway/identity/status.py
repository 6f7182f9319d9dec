"""What an identifier says about itself and its models."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import msgspec

from gateway.identity.chat import Dialect
from gateway.identity.prompt import IdentityMode
from gateway.identity.tokens import CacheStats

REASONS = frozenset(
    {
        "bad_request",
        "bad_template",
        "bad_tokenizer",
        "busy",
        "deadline",
        "no_parity",
        "no_template",
        "no_tokenizer",
        "restarting",
        "suspended",
        "template_error",
        "tokenizer_error",
        "unsupported_content",
        "unsupported_kwargs",
        "worker_died",
    }
)
"""Every reason for which an identifier answers in text mode."""

NOT_TRIED = frozenset({"busy", "deadline", "no_tokenizer", "restarting", "suspended", "worker_died"})
"""Those that say nothing of the request itself: the same one may be exact a moment later."""


class PromptKind(StrEnum):
    """Kinds of requests whose parity with the engine is judged apart."""

    CHAT = "chat"
    TOOLS = "tools"
    PROMPT = "prompt"


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose tokenizer is in use.

    `segmented` says whether token ids of segments are remembered, `whole_because` why not; `chat` whether it has a
    template.
    """

    model: str
    digest: str
    segmented: bool
    whole_because: str
    chat: bool


class ModelMode(msgspec.Struct, frozen=True, kw_only=True):
    """How requests of a model are identified now: `mode`, `why` it is not EXACT, and the kinds that are not."""

    mode: IdentityMode
    why: str
    off: frozenset[PromptKind]
    dialect: Dialect | None
    segmented: bool


class IdentityStats(msgspec.Struct):
    """Counts since an identifier was made: prompts identified exactly, fallbacks to text by reason, workers killed at a
    deadline, workers started, and the segment caches' lookups (what they hold is as of their last answers).
    """

    exact: int = 0
    fallbacks: Counter[str] = msgspec.field(default_factory=Counter)
    deadline_kills: int = 0
    worker_starts: int = 0
    cache: CacheStats = msgspec.field(default_factory=CacheStats)

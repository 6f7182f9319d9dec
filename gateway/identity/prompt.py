"""What identifies a prompt: the request fields that decide its tokens, and the RouteKeys they lead to."""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec

from kvstore.identity import UNIT_TOKENS, Namespace


class IdentityMode(StrEnum):
    """How the keys of a prompt were got."""

    EXACT = "exact"
    """From the engine's own token ids: comparable with what replicas report."""
    TEXT = "text"
    """From the canonical text: comparable only with what this gateway itself placed."""
    HASH = "hash"
    """From the text, for the ring alone; no index is asked."""


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that decide its prompt tokens, as raw JSON slices of the client's body.

    Exactly one of `messages` (chat) and `prompt` (completions: a string, a list of token ids, or a list of either) is
    set. A list of several prompts is identified by its first. `reasoning_effort` is passed to the chat template, as
    engines do.
    """

    model: str
    namespace: Namespace
    messages: bytes | None = None
    prompt: bytes | None = None
    tools: bytes | None = None
    chat_template_kwargs: bytes | None = None
    documents: bytes | None = None
    reasoning_effort: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None


class PromptIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """RouteKeys of a prompt's whole units, in order, and how they were got.

    `tokens` is the prompt's length: exact in EXACT mode, else estimated from its bytes. `unit_tokens` is how many
    tokens one key stands for (an estimate outside EXACT). `fallback` says why the mode is not EXACT, "" if it is.
    """

    mode: IdentityMode
    keys: array[int]
    tokens: int
    unit_tokens: int = UNIT_TOKENS
    fallback: str = ""

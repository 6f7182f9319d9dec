"""One block as an engine's events tell it: how often it is held, and how far its name is known."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.identity import wire_block_hash
from kvstore.messages import ROOT_PARENT
from replica_agent.events.decode import BlockStored, EngineHash

# How far a block's identity is known. An ORPHAN may still become NAMED; an UNNAMED block never will, nor its children.
NAMED, ORPHAN, UNNAMED = range(3)


COPIES_BITS = 32
_COPIES_MASK = (1 << COPIES_BITS) - 1


class Block(msgspec.Struct, gc=False):
    """One engine hash: its copies by place, packed, and its RouteKey once the chain to the root is known.

    Refers to nothing that could refer back, and the garbage collector leaves it alone: to look at a million of them
    would hold the event loop for some tenths of a second.
    """

    copies: int = 0
    state: int = ORPHAN
    key: int = 0
    parent_key: int = ROOT_PARENT
    parent: EngineHash | None = None
    tokens: bytes = b""

    def copies_in(self, place: int) -> int:
        """Copies in one place."""
        return self.copies >> COPIES_BITS * place & _COPIES_MASK


def names_of(key: bytes) -> tuple[EngineHash, EngineHash]:
    """What an engine's events may call a block: by default they carry its hash's last 64 bits."""
    return wire_block_hash(key), key


def salt_of(event: BlockStored, index: int, *, first: bool) -> str | None:
    """The salt that starts a chain ("" below the first block); None when the block's extra keys are not understood."""
    extra: list[Any] = event.extra[index] if event.extra else []
    if event.lora and extra and extra[0] == event.lora:
        extra = extra[1:]
    if not extra:
        return event.salt
    if first and len(extra) == 1 and isinstance(extra[0], str):
        return extra[0]
    return None

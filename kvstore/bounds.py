"""How much a peer may say: every length and number of a message has a bound, which its decoder holds it to.

Types for the fields of `kvstore.messages` and `kvstore.peer_messages`. Who sends something that came from elsewhere,
such as an engine's words, cuts it with `clipped`: the reader would refuse all of the message.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_NAME = 512
"""Characters of a name: replica, model, adapter, request."""

MAX_TEXT = 4_096
"""Characters of a sentence: a reason, a problem and its fix."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

U64 = Annotated[int, Meta(ge=0)]
"""msgpack has no larger number. JSON has, and msgspec knows no bound above 2**63: a JSON message calls `check_u64`."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(gt=0, le=1e24)]
"""Tokens or bytes per second; finite."""
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""A duration or a time; finite."""


def check_u64(**numbers: int) -> None:
    """Raises ValueError, naming the field, for a number that is no u64: for `__post_init__`, where msgspec makes a
    ValidationError of it."""
    for field, number in numbers.items():
        if not 0 <= number < 1 << 64:
            raise ValueError(f"{field}: expected a number below 2**64 that is not negative")


def clipped(text: str, most: int = MAX_NAME) -> str:
    """The text, or as much of its beginning as fits with a mark that something is missing."""
    return text if len(text) <= most else f"{text[: most - 3]}..."

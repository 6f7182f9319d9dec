"""Text from tokens as they come, never showing half a character or anything of a stop string."""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "�"
_LONGEST_HOLD = 3
"""Bytes of UTF-8 that may be waiting for their last one; some decoders show each as a replacement character."""

_WINDOW = 24
"""Tokens decoded again for each new one, at most; bounds the work for a token."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        ...


class Detokenizer:
    """Turns one sequence's tokens into text. All texts together are decode(all tokens)."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Text that is complete now; a trailing piece of a character is kept until the rest of it has come."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        complete = len(text)
        while complete > self._shown and len(text) - complete < _LONGEST_HOLD and text[complete - 1] == _REPLACEMENT:
            complete -= 1
        piece = text[self._shown : complete]
        self._shown = max(self._shown, complete)
        if self._shown == len(text) and len(self._window) >= _WINDOW:
            # Keep the last token as context: some decoders treat the first of a text differently.
            del self._window[:-1]
            self._shown = len(self._decoder.decode(self._window))
        return piece

    def finish(self) -> str:
        """What was kept: characters that will never be completed."""
        piece = self._decoder.decode(self._window)[self._shown :]
        self._window.clear()
        self._shown = 0
        return piece


class StopFilter:
    """Passes text through up to the first stop string, keeping back only what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was met). The stop string itself is never shown."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was kept back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

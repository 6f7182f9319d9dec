"""What a person sees: plain lines, with a little colour on a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from gateway.demo.client import Answer

_MIB = 1024 * 1024
_BOLD, _DIM, _GREEN, _RED = "1", "2", "32", "31"


def mib(size: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{size / _MIB:.1f} MiB"


def _fetch(answer: Answer) -> str:
    """Tokens that were not computed because they were found outside the engine, and what either costs."""
    fetched = answer.fetched
    if fetched is None or not fetched.tokens:
        return ""
    return f"  {fetched.tokens:>8}{fetched.seconds * 1000:>5.0f} ms{fetched.recompute_s * 1000:>11.0f} ms"


class Screen:
    """Writes to one stream; colours only when it is a terminal."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._colour = out.isatty()

    def line(self, text: str = "") -> None:
        """One line."""
        print(text, file=self._out, flush=True)

    def title(self, text: str) -> None:
        """A heading, after an empty line."""
        self.line()
        self.line(self._styled(text, _BOLD))

    def columns(self) -> None:
        """The heading of `answer` lines."""
        heading = (
            f"  {'document':<20}{'replica':<12}{'reason':<10}{'predicted':>10}{'cached':>8}{'prompt':>8}{'TTFT':>9}"
            f"  {'fetched':>8}{'in':>8}{'instead of':>14}"
        )
        self.line(self._styled(heading, _DIM))

    def answer(self, answer: Answer) -> None:
        """One answered question."""
        figures = f"{answer.predicted:>10}{answer.cached:>8}{answer.prompt_tokens:>8}{answer.ttft_s * 1000:>6.0f} ms"
        self.line(f"  {answer.document:<20}{answer.replica:<12}{answer.reason:<10}{figures}{_fetch(answer)}")

    def verdict(self, ok: bool, text: str) -> None:
        """One thing that was checked."""
        self.line(f"  {self._styled('ok  ', _GREEN) if ok else self._styled('FAIL', _RED)} {text}")

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

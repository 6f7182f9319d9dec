"""Tables and figures for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 118


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Lines of a table; the first `left` columns are text and begin at their left edge."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for row in (headers, *rows):
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def notes(items: Sequence[str]) -> list[str]:
    """Lines of a list of remarks, wrapped."""
    lines = []
    for item in items:
        lines += textwrap.wrap(item, WIDTH, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def figure(value: float) -> str:
    """Three digits of a number that a reader compares, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if value < 0.1 else 1 if value >= 10 else 2}f}" if value >= 0.01 else f"{value:.2g}"

"""Charts as SVG text: enough for curves that cross and for points along a path, and nothing to install."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 800, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 56, 60
_COLORS = ("#0b6bcb", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#be185d", "#0f766e", "#475569")


@dataclass(frozen=True, slots=True)
class Series:
    """A named curve: (x, y) with x rising; points that are not above 0 have no place on a logarithmic axis."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis worth pointing at."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis from `low` to `high`, logarithmic or not, drawn between two pixel positions."""

    low: float
    high: float
    start: float
    end: float
    fixed: Sequence[float] = ()
    linear: bool = False

    def at(self, value: float) -> float:
        if self.linear:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + (self.end - self.start) * share, 1)

    def ticks(self) -> list[float]:
        """The given ones, or powers of ten; with few of them also their double and half. Five on a linear axis."""
        if self.fixed:
            return list(self.fixed)
        if self.linear:
            return [self.low + (self.high - self.low) * step / 4 for step in range(5)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 4 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    x_ticks: Sequence[float] = (),
) -> str:
    """Both axes are logarithmic. Curves are named at their right end, in their own colour. Needs one point above 0."""
    lines = [Series(s.name, [p for p in s.points if min(p) > 0], s.dashed) for s in series]
    lines = [line for line in lines if line.points]
    x_axis = _axis([x for line in lines for x, _ in line.points], _LEFT, _WIDTH - _RIGHT, x_ticks)
    y_axis = _axis([y for line in lines for _, y in line.points], _HEIGHT - _BOTTOM, _TOP)
    parts = _frame(title, x_label, y_label, x_axis, y_axis)
    for mark in marks:
        if x_axis.low <= mark.x <= x_axis.high:
            x = x_axis.at(mark.x)
            parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM, 'stroke="#555" stroke-dasharray="2 4"'))
            parts.append(_text(x + 6, _TOP + 14, mark.text, "start"))
    names = _spread([y_axis.at(line.points[-1][1]) for line in lines])
    for at, (line, name_y) in enumerate(zip(lines, names, strict=True)):
        color = _COLORS[at % len(_COLORS)]
        path = " ".join(f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in line.points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"{dash}/>')
        end = x_axis.at(line.points[-1][0])
        parts.append(_text(end + 8, name_y + 4, line.name, "start", f'style="fill:{color}"'))
    return "\n".join([*parts, "</svg>", ""])


def path_chart(title: str, x_label: str, y_label: str, points: Sequence[tuple[float, float, str]]) -> str:
    """Named points (x, y, name) joined in their order, on linear axes that begin at the least of them, or at 0."""
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    x_axis = _Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, _LEFT, _WIDTH - _RIGHT, linear=True)
    y_axis = _Axis(0.0, max(ys) * 1.1 or 1.0, _HEIGHT - _BOTTOM, _TOP, linear=True)
    places = [(x_axis.at(x), y_axis.at(y)) for x, y, _ in points]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = _frame(title, x_label, y_label, x_axis, y_axis)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLORS[0]}" stroke-width="1.5"/>')
    for (x, y), (_, _, name) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{_COLORS[0]}"/>')
        parts.append(_text(x + 7, y - 6, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, x_label: str, y_label: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 28, title, "start", 'font-size="15" font-weight="600"'),
        *_grid(x_axis, y_axis),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, x_label),
        f'<g transform="translate(20 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y_label)}</g>',
    ]


def _axis(values: Sequence[float], start: float, end: float, ticks: Sequence[float] = ()) -> _Axis:
    low, high = min(values), max(values)
    return _Axis(low, high, start, end, ticks) if high > low else _Axis(low / 2, high * 2, start, end, ticks)


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(_line(x, y_axis.start, x, y_axis.end, 'stroke="#e5e5e5"'))
        parts.append(_text(x, y_axis.start + 18, _tick(tick)))
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(_line(x_axis.start, y, x_axis.end, y, 'stroke="#e5e5e5"'))
        parts.append(_text(x_axis.start - 8, y + 4, _tick(tick), "end"))
    return parts


def _spread(places: Sequence[float]) -> list[float]:
    """The same places, moved down where two names would lie on each other."""
    spread = list(places)
    free = -math.inf
    for at in sorted(range(len(places)), key=lambda index: places[index]):
        spread[at] = max(places[at], free)
        free = spread[at] + 15
    return spread


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {attributes}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {attributes}>{escape(text)}</text>'

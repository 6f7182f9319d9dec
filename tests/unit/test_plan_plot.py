"""The SVG chart: well-formed whatever it is given, with every point inside the frame and where it belongs."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from gateway.plan.plot import Mark, Series, line_chart
from gateway.plan.text import figure, notes, table

NAMESPACE = "{http://www.w3.org/2000/svg}"
VALUES = st.floats(1e-12, 1e12)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    found = []
    for line in root.iter(f"{NAMESPACE}polyline"):
        pairs = (pair.split(",") for pair in line.attrib["points"].split())
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def test_both_axes_are_logarithmic() -> None:
    series = [Series("a", [(1, 1), (10, 10), (100, 100)]), Series("b", [(1, 100), (100, 1)])]
    first, second = polylines(line_chart("t", "x", "y", series))
    (x0, y0), (x1, y1), (x2, y2) = first
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.2) and math.isclose(y0 - y1, y1 - y2, abs_tol=0.2)
    assert second == [(x0, y2), (x2, y0)]


def test_names_are_escaped_and_marks_drawn() -> None:
    svg = line_chart(
        "<t> & more", "x", "y", [Series("a<b", [(1, 1), (9, 9)])], marks=[Mark(3, "here"), Mark(99, "out")]
    )
    assert "<t> & more" in texts(svg) and "a<b" in texts(svg) and "here" in texts(svg)
    assert "out" not in texts(svg)


def test_ticks_may_be_given() -> None:
    svg = line_chart("t", "x", "y", [Series("a", [(1, 1), (16, 3)])], x_ticks=(1, 2, 4, 8, 16))
    assert {"1", "2", "4", "8", "16"} <= set(texts(svg))


def test_names_at_one_place_do_not_lie_on_each_other() -> None:
    svg = line_chart("t", "x", "y", [Series(name, [(1, 1), (2, 7)]) for name in "abcd"])
    places = sorted(
        float(element.attrib["y"])
        for element in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")
        if element.text in ("a", "b", "c", "d")
    )
    assert all(after - before >= 15 for before, after in pairwise(places))


@given(st.lists(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=5), min_size=1, max_size=5))
def test_every_point_is_inside_the_frame(curves: list[list[tuple[float, float]]]) -> None:
    svg = line_chart("t", "x", "y", [Series(str(at), [*points, (0, 1)]) for at, points in enumerate(curves)])
    found = polylines(svg)
    assert [len(line) for line in found] == [len(points) for points in curves], "0 has no place on a log axis"
    assert all(0 <= x <= 800 and 0 <= y <= 480 for line in found for x, y in line)


def test_tables_and_figures() -> None:
    assert table(["name", "n"], [["a", "1"], ["bcd", "10"]], left=1) == ["name   n", "a      1", "bcd   10"]
    assert [figure(value) for value in (0.0, 0.00123, 0.05, 0.5, 5.0, 50.0, 5_000.0)] == [
        *("0", "0.0012", "0.05", "0.50", "5.00", "50.0", "5,000"),
    ]
    wrapped = notes(["word " * 40])
    assert len(wrapped) == 2 and wrapped[0].startswith("* word") and wrapped[1].startswith("  word")

"""`plan crossover`: the prefix length from which fetching KV is cheaper than computing it again.

A fetch costs a latency and the prefix's bytes over the link; recomputing costs the operations of its prefill at the
speed that a replica achieves. The output head is left out: the last token of a prompt is computed either way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from gateway.errors import SettingsError
from gateway.plan.inputs import Model, amount, counts, number, read_model, write_plot
from gateway.plan.plot import Mark, Series, line_chart
from gateway.plan.text import figure, table
from kvstore.cost import decide, transfer_seconds
from kvstore.flops import prefill_flops

_CONTEXT = 131_072
"""Longest prefix looked at where the model's config does not say how long a context can be."""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """Between what is chosen: a link's latency and rate, and the operations per second of a replica."""

    latency_s: float
    bytes_per_s: float
    flops_per_s: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix length."""

    tokens: int
    kv_bytes: int
    fetch_s: float
    recompute_s: float


class CrossoverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan crossover --json` prints. `crossing_tokens` is the shortest prefix worth fetching, None where even
    one of `longest_tokens` is not."""

    model: str
    dtype: str
    bytes_per_token: int
    path: Path
    crossing_tokens: int | None
    longest_tokens: int
    points: list[Point]


def plan(options: argparse.Namespace) -> str:
    """What the command prints. Raises SettingsError naming the flag."""
    model = read_model(options.model or "llama-3-8b", options.dtype)
    path = _path(options)
    lengths = counts("--tokens", options.tokens) if options.tokens else None
    longest = max(model.shape.max_tokens or _CONTEXT, *(lengths or [1]))
    found = CrossoverPlan(
        model=model.name,
        dtype=model.geometry.dtype,
        bytes_per_token=model.geometry.bytes_per_token,
        path=path,
        crossing_tokens=crossing(model, path, longest),
        longest_tokens=longest,
        points=[point(model, path, tokens) for tokens in lengths or doublings(longest)],
    )
    if options.plot:
        write_plot(options.plot, _plot(model, found))
    if options.json:
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    return "\n".join(_render(found))


def point(model: Model, path: Path, tokens: int) -> Point:
    """What a prefix of `tokens` costs either way."""
    size = model.geometry.sequence_bytes(tokens)
    operations = prefill_flops(model.shape, tokens) - model.shape.head_flops
    return Point(
        tokens=tokens,
        kv_bytes=size,
        fetch_s=transfer_seconds(size, path.latency_s, path.bytes_per_s),
        recompute_s=operations / path.flops_per_s,
    )


def crossing(model: Model, path: Path, longest: int) -> int | None:
    """The shortest prefix worth fetching, None where none up to `longest` is.

    What a fetch saves is a convex function of the length (attention makes recomputing grow faster, windows make the
    bytes grow slower) and not positive at 0, so once it pays it goes on paying, and halving finds the place.
    """

    def pays(tokens: int) -> bool:
        at = point(model, path, tokens)
        return decide(at.fetch_s, 0.0, at.recompute_s, margin=0.0)

    if not pays(longest):
        return None
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def doublings(longest: int, first: int = 32) -> list[int]:
    """Prefix lengths from `first`, each twice the one before it, to `longest`."""
    lengths = [min(first, longest)]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    return lengths


def verdict(crossing_tokens: int | None, longest: int) -> str:
    """In words, for a reader who knows neither figure."""
    if crossing_tokens is None:
        return f"never: recomputing is cheaper at every length up to {longest:,} tokens"
    if crossing_tokens == 1:
        return "always: fetching is cheaper at every length"
    return f"fetching is cheaper from {crossing_tokens:,} tokens on"


def _path(options: argparse.Namespace) -> Path:
    if options.link_gbps is not None:
        if options.link_gigabytes_per_s is not None:
            raise SettingsError("--link-gbps: --link-gigabytes-per-s is given, too; give one")
        bytes_per_s = number("--link-gbps", options.link_gbps) * 1e9 / 8
    else:
        bytes_per_s = number("--link-gigabytes-per-s", options.link_gigabytes_per_s or "50") * 1e9
    return Path(
        latency_s=amount("--latency-ms", options.latency_ms or "1", below=1e9) / 1e3,
        bytes_per_s=bytes_per_s,
        flops_per_s=number("--tflops", options.tflops or "600") * 1e12,
    )


def _render(found: CrossoverPlan) -> list[str]:
    path = found.path
    rows = [
        [
            f"{at.tokens:,}",
            figure(at.kv_bytes / 1e6),
            figure(at.fetch_s * 1e3),
            figure(at.recompute_s * 1e3),
            "fetch" if decide(at.fetch_s, 0.0, at.recompute_s, margin=0.0) else "recompute",
        ]
        for at in found.points
    ]
    return [
        f"{found.model}, {found.bytes_per_token:,} bytes of {found.dtype} KV a token: fetched at "
        f"{path.bytes_per_s / 1e9:g} GB/s after {path.latency_s * 1e3:g} ms, or recomputed at "
        f"{path.flops_per_s / 1e12:g} TFLOP/s",
        "",
        *table(["tokens", "KV MB", "fetch ms", "recompute ms", "cheaper"], rows),
        "",
        verdict(found.crossing_tokens, found.longest_tokens),
    ]


def _plot(model: Model, found: CrossoverPlan) -> str:
    at = curve(model, found.path, [each.tokens for each in found.points])
    marks = []
    if found.crossing_tokens is not None and found.crossing_tokens > 1:
        marks.append(Mark(found.crossing_tokens, f"{found.crossing_tokens:,} tokens"))
    return line_chart(
        f"{found.model}: fetch or recompute a prefix",
        "prefix, tokens",
        "ms",
        [
            Series("fetch", [(each.tokens, each.fetch_s * 1e3) for each in at]),
            Series("recompute", [(each.tokens, each.recompute_s * 1e3) for each in at]),
        ],
        marks=marks,
    )


def curve(model: Model, path: Path, lengths: Sequence[int]) -> list[Point]:
    """Enough points between the shortest and the longest of `lengths` to draw a smooth line."""
    low, high = min(lengths), max(lengths)
    places = {round(low * (high / low) ** (step / 60)) for step in range(61)}
    return [point(model, path, tokens) for tokens in sorted(places)]

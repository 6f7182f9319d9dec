"""`plan crossover --as-published`: a published worked example beside the exact figures, with what makes the difference.

The example is the lesson "Distributed KV Cache" (PidokuInfra), sections 2, 4, 5 and 7: Llama-3-8B, 8e9 parameters that
are all multiplied for each token, 128 KB = 128,000 bytes of KV a token, 600 TFLOP/s, no attention term, no latency.
"""

from __future__ import annotations

import argparse
import math

import msgspec

from gateway.errors import SettingsError
from gateway.plan.crossover import Path, curve, doublings
from gateway.plan.inputs import Model, read_model, write_plot
from gateway.plan.plot import Series, line_chart
from gateway.plan.text import notes, table
from kvstore.flops import prefill_flops

_FLOPS_PER_S = 600e12
_WEIGHTS = 8e9
_BYTES_PER_TOKEN = 128e3
_MOVES = {
    "copy to a GPU of the node, NVLink": (370e9, "3.5"),
    "copy to another node, InfiniBand NDR": (50e9, "26"),
    "copy to the CPU, PCIe Gen5": (55e9, "23"),
    "copy to the CPU, NVLink-C2C": (900e9, "1.4"),
    "load from local NVMe": (7e9, "183"),
    "load from a remote object store": (2e9, "640"),
}
"""Bytes per second, and the milliseconds printed for 10,000 tokens."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One printed figure: as published (ms), what its own arithmetic gives, and the exact value."""

    operation: str
    tokens: int
    published_ms: str
    arithmetic_ms: float
    exact_ms: float
    difference: str


class PublishedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan crossover --as-published --json` prints; times in milliseconds, as published."""

    model: str
    rows: list[Row]
    remarks: list[str]


def plan(options: argparse.Namespace) -> str:
    """What the command prints. Raises SettingsError for a flag that would be another example."""
    for flag in ("model", "dtype", "link_gigabytes_per_s", "link_gbps", "latency_ms", "tflops", "tokens"):
        if getattr(options, flag) is not None:
            raise SettingsError(f"--{flag.replace('_', '-')}: --as-published has its own; leave one of them out")
    model = read_model("llama-3-8b")
    rows = [_recompute(model, 10_000, "267")]
    rows += [_move(model, name, 10_000, rate, printed) for name, (rate, printed) in _MOVES.items()]
    rows += [_recompute(model, 500, "13"), _move(model, "copy to another node, InfiniBand NDR", 500, 50e9, "1.3")]
    found = PublishedPlan(model=model.name, rows=rows, remarks=_remarks(model))
    if options.plot:
        write_plot(options.plot, _plot(model))
    if options.json:
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    return "\n".join(_render(found))


def as_printed(milliseconds: float) -> str:
    """To the digits that the example prints: two, and whole milliseconds."""
    return f"{milliseconds:.2g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _recompute(model: Model, tokens: int, printed: str) -> Row:
    shape = model.shape
    linear = 2 * shape.active_weights * tokens
    attention = prefill_flops(shape, tokens) - shape.head_flops - linear
    return Row(
        operation="recompute",
        tokens=tokens,
        published_ms=printed,
        arithmetic_ms=2 * _WEIGHTS * tokens / _FLOPS_PER_S * 1e3,
        exact_ms=(linear + attention) / _FLOPS_PER_S * 1e3,
        difference=f"{shape.active_weights / _WEIGHTS - 1:+.1%} because {shape.active_weights / 1e9:.2f} B weights are "
        f"multiplied for each token, not 8 B: the rest of {shape.weights / 1e9:.2f} B are the embedding, which is "
        f"looked up, and the output head, which the last token alone needs; then {attention / linear:+.1%} because "
        "attending to the tokens before costs operations, too",
    )


def _move(model: Model, name: str, tokens: int, bytes_per_s: float, printed: str) -> Row:
    exact = model.geometry.bytes_per_token
    return Row(
        operation=name,
        tokens=tokens,
        published_ms=printed,
        arithmetic_ms=_BYTES_PER_TOKEN * tokens / bytes_per_s * 1e3,
        exact_ms=exact * tokens / bytes_per_s * 1e3,
        difference=f"{exact / _BYTES_PER_TOKEN - 1:+.1%} because 128 KiB are {exact:,} bytes, not 128,000",
    )


def _remarks(model: Model) -> list[str]:
    """Where the example contradicts itself, with the figures of its own arithmetic."""
    recompute_us = 2 * _WEIGHTS / _FLOPS_PER_S * 1e6
    fetch_us = _BYTES_PER_TOKEN / 50e9 * 1e6
    pcie_ms = _BYTES_PER_TOKEN * 10_000 / 55e9 * 1e3
    exact_gb = model.geometry.bytes_per_token * 2_000 * 8 / 1e9
    pays_from = math.ceil(1e3 / (recompute_us - fetch_us))
    return [
        "Section 7 asks whether NVMe (183 ms) is slower than recomputing (267 ms), then says that it is faster but "
        "not by much: it is 1.5 times faster. The object store (640 ms) is 2.4 times slower, as it says.",
        f"Section 4 calls recomputing 2,000 tokens often comparable to, or cheaper than, a fetch of 5 ms. By its own "
        f"arithmetic recomputing takes {recompute_us * 2:.0f} ms, ten times as long.",
        f"Both of its costs are proportional to the length ({recompute_us:.1f} and {fetch_us:.2f} us a token), so they "
        "never cross: fetching is 10 times cheaper at any length. What makes recomputing win for short prefixes is the "
        f"latency that it leaves out: with 1 ms, fetching wins from {pays_from} tokens on.",
        "Section 4 says that the same arithmetic makes recomputing beat swapping over PCIe, because that link is much "
        f"slower. Its table says {pcie_ms:.0f} ms for PCIe and 26 ms for InfiniBand: even out and back in, swapping "
        f"takes {2 * pcie_ms:.0f} ms against 267 ms.",
        "Section 4 counts 8 copies of 2,000 tokens as 2 GB of duplicated KV. One copy is needed: 7 of 8, "
        f"{exact_gb * 7 / 8:.2f} GB of {exact_gb:.2f} GB, are duplicates.",
        "Section 2 says that only sequence parallelism lets the KV of one sequence exceed one GPU, and in the next "
        "sentence that TP and PP give one sequence more room. The second is right: they split its heads and layers.",
    ]


def _render(found: PublishedPlan) -> list[str]:
    rows = [
        [each.operation, f"{each.tokens:,}", each.published_ms, f"{each.arithmetic_ms:.2f}", f"{each.exact_ms:.2f}"]
        for each in found.rows
    ]
    reasons = []
    for each in found.rows:
        what = f"recompute {each.tokens:,} tokens" if each.operation == "recompute" else "every copy and load"
        reasons.append(f"{what}: {each.difference}.")
    return [
        f"{found.model} at 600 TFLOP/s: the lesson's figures, what its own arithmetic gives, and the exact ones (ms)",
        "",
        *table(["operation", "tokens", "published", "arithmetic", "exact"], rows, left=1),
        "",
        "Why exact differs from arithmetic:",
        *notes(list(dict.fromkeys(reasons))),
        "",
        "Where the lesson disagrees with itself:",
        *notes(found.remarks),
    ]


def _plot(model: Model) -> str:
    path = Path(latency_s=0.0, bytes_per_s=50e9, flops_per_s=_FLOPS_PER_S)
    at = curve(model, path, doublings(model.shape.max_tokens))
    return line_chart(
        "llama-3-8b: as published, and exact",
        "prefix, tokens",
        "ms",
        [
            Series("fetch, exact", [(each.tokens, each.fetch_s * 1e3) for each in at]),
            Series("recompute, exact", [(each.tokens, each.recompute_s * 1e3) for each in at]),
            Series("fetch, published", [(x.tokens, _BYTES_PER_TOKEN * x.tokens / 5e7) for x in at], dashed=True),
            Series("recompute, published", [(x.tokens, 16e12 * x.tokens / _FLOPS_PER_S) for x in at], dashed=True),
        ],
    )

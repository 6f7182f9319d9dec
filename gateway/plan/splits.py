"""`plan splits`: what each way of splitting a model over GPUs leaves for KV.

Tensor parallelism splits heads, pipeline parallelism layers, and data parallelism neither: it adds replicas with caches
of their own. Weights are spread evenly over a stage; the first stage also has the embedding, the last the output head.
"""

from __future__ import annotations

import argparse
from itertools import product

import msgspec

from gateway.errors import SettingsError
from gateway.plan.inputs import Model, amount, counts, number, read_model, write_plot
from gateway.plan.plot import Series, line_chart
from gateway.plan.text import figure, notes, table
from kvstore.errors import GeometryError
from kvstore.geometry import stage_layers

_ENDLESS = 1 << 40
"""Tokens that no sequence has; where they fit, no window-bounded sequence is too long."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU has: bytes, the share of them kept free, and bytes of one weight."""

    gpu_bytes: float
    reserve: float
    weight_bytes: float


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way: `tp` x `pp` GPUs a replica, `dp` replicas. A GPU's figures are those of the fullest stage.

    `head_copies`: how often a replica keeps each KV head. `stored_bytes_per_token`: over all GPUs of a replica.
    `tokens` fit into all replicas together while every layer keeps every token, `sequence_tokens` into one sequence
    (None: no limit, all layers are windowed). `refused` says why engines do not start this way, if they do not.
    """

    tp: int
    pp: int
    dp: int
    gpus: int
    gpu_heads: int
    gpu_layers: int
    head_copies: float
    gpu_bytes_per_token: int
    stored_bytes_per_token: int
    gpu_weight_bytes: int
    tokens: int
    sequence_tokens: int | None
    refused: str = ""


class SplitsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan splits --json` prints."""

    model: str
    dtype: str
    bytes_per_token: int
    growth_per_token: int
    weights: int
    memory: Memory
    splits: list[Split]
    notes: list[str]


def plan(options: argparse.Namespace) -> str:
    """What the command prints. Raises SettingsError naming the flag."""
    model = read_model(options.model, options.dtype)
    memory = Memory(
        gpu_bytes=number("--gpu-bytes", options.gpu_bytes),
        reserve=amount("--reserve", options.reserve, below=1.0),
        weight_bytes=number("--weight-bytes", options.weight_bytes),
    )
    sizes = {flag: counts(f"--{flag}", getattr(options, flag)) for flag in ("tp", "pp", "dp")}
    try:
        splits = [split(model, memory, tp, pp, dp) for tp, pp, dp in product(sizes["tp"], sizes["pp"], sizes["dp"])]
    except GeometryError as error:
        raise SettingsError(f"--{error}") from error
    found = SplitsPlan(
        model=model.name,
        dtype=model.geometry.dtype,
        bytes_per_token=model.geometry.bytes_per_token,
        growth_per_token=model.geometry.growth_per_token,
        weights=model.shape.weights,
        memory=memory,
        splits=splits,
        notes=_notes(model, splits),
    )
    if options.plot:
        write_plot(options.plot, _plot(found))
    if options.json:
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    return "\n".join(_render(found))


def split(model: Model, memory: Memory, tp: int, pp: int, dp: int) -> Split:
    """The figures of one way. Raises GeometryError for more stages than layers."""
    geometry, shape = model.geometry, model.shape
    stages = stage_layers(geometry.layers, pp)
    heads = geometry.heads_per_rank(tp)
    weights = [shape.layer_weights * len(stage) / shape.layers for stage in stages]
    ends = shape.hidden * shape.vocab
    weights[0] += ends
    if pp > 1 or not shape.tied:
        weights[-1] += ends
    gpu_weights = [stage * memory.weight_bytes / tp for stage in weights]
    free = [int(memory.gpu_bytes * (1 - memory.reserve) - each) for each in gpu_weights]
    room = list(zip(stages, free, strict=True))
    tokens = min(each // (len(stage) * heads * geometry.row_bytes) for stage, each in room)
    return Split(
        tp=tp,
        pp=pp,
        dp=dp,
        gpus=tp * pp * dp,
        gpu_heads=heads,
        gpu_layers=max(map(len, stages)),
        head_copies=geometry.replication(tp),
        gpu_bytes_per_token=geometry.rank_bytes_per_token(tp, pp),
        stored_bytes_per_token=round(geometry.bytes_per_token * geometry.replication(tp)),
        gpu_weight_bytes=round(max(gpu_weights)),
        tokens=max(0, tokens) * dp,
        sequence_tokens=_longest(model, tp, room),
        refused=_refused(model, tp),
    )


def _longest(model: Model, tp: int, room: list[tuple[range, int]]) -> int | None:
    """Tokens of the longest sequence that fits into every stage."""

    def fits(tokens: int) -> bool:
        return all(model.geometry.rank_sequence_bytes(tokens, tp, stage) <= free for stage, free in room)

    if fits(_ENDLESS):
        return None
    low, high = 0, _ENDLESS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refused(model: Model, tp: int) -> str:
    heads, kv_heads = model.shape.heads, model.geometry.kv_heads
    if heads % tp:
        return f"{heads} query heads do not divide by {tp}"
    if kv_heads % tp and tp % kv_heads:
        return f"neither of {tp} ranks and {kv_heads} KV heads divides the other"
    return ""


def _notes(model: Model, splits: list[Split]) -> list[str]:
    geometry = model.geometry
    found = [
        "TP and PP give one sequence more room, DP does not: each replica keeps whole sequences in a cache of its own, "
        "so DP adds tokens in all, and copies of whatever prefix more than one replica holds.",
        "Expert parallelism changes nothing: KV belongs to attention. It only moves expert weights, and the room that "
        "frees on a GPU is not counted here.",
    ]
    copied = {each.tp: each for each in splits if each.head_copies > 1}
    if geometry.latent:
        found.append("Latent attention keeps one latent for all heads: every GPU of a TP group has all of it.")
    else:
        for tp, each in copied.items():
            found.append(
                f"TP {tp} with {geometry.kv_heads} KV heads keeps each head {each.head_copies:g} times: a replica "
                f"stores {_kib(each.stored_bytes_per_token)} KiB a token for {_kib(geometry.bytes_per_token)} KiB of "
                f"KV, and {1 - 1 / each.head_copies:.0%} of its KV memory holds copies."
            )
    if geometry.windows:
        windowed = [window for window in geometry.windows if window]
        found.append(
            f"{len(windowed)} of {geometry.layers} layers have a window of {windowed[0]:,} tokens: beyond it a sequence"
            f" grows by {_kib(geometry.growth_per_token)} KiB a token only. The longest sequence counts on that."
        )
    for tp, reason in {each.tp: each.refused for each in splits if each.refused}.items():
        found.append(f"TP {tp}: engines refuse it, {reason}.")
    return found


def _render(found: SplitsPlan) -> list[str]:
    memory = found.memory
    headers = ["TP", "PP", "DP", "GPUs", "heads", "layers", "copies", "KiB/token"]
    headers += ["weights GB", "tokens that fit", "longest sequence"]
    rows = [
        [
            *map(str, (each.tp, each.pp, each.dp, each.gpus, each.gpu_heads, each.gpu_layers)),
            f"{each.head_copies:g}",
            _kib(each.gpu_bytes_per_token),
            figure(each.gpu_weight_bytes / 1e9),
            f"{each.tokens:,}" if each.tokens else "weights do not fit",
            "no limit" if each.sequence_tokens is None else f"{each.sequence_tokens:,}",
        ]
        for each in found.splits
    ]
    return [
        f"{found.model}: {_kib(found.bytes_per_token)} KiB of {found.dtype} KV a token, "
        f"{found.weights / 1e9:.1f} B weights of {memory.weight_bytes:g} bytes",
        f"GPUs of {memory.gpu_bytes / 1e9:g} GB, {memory.reserve:.0%} kept free. Heads, layers, copies of a head, "
        "KiB/token and weights are those of one GPU.",
        "",
        *table(headers, rows),
        "",
        *notes(found.notes),
    ]


def _plot(found: SplitsPlan) -> str:
    lines, sizes = [], sorted({each.tp for each in found.splits})
    for pp in dict.fromkeys(each.pp for each in found.splits):
        points = {each.tp: each.gpu_bytes_per_token / 1024 for each in found.splits if each.pp == pp}
        lines.append(Series(f"PP {pp}", sorted(points.items())))
    return line_chart(f"{found.model}: KV of one token on one GPU", "TP", "KiB", lines, x_ticks=sizes)


def _kib(size: float) -> str:
    return figure(size / 1024)

"""What `bench transfer` found, as JSON and as text. GB is 1e9 bytes; `of_memcpy` compares within one round."""

from __future__ import annotations

import msgspec


class Speed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One way to move the slots, over all rounds. `of_memcpy` is of the whole, as the event loop waits for it, with the
    thread that has to wake and to be heard; `flow_of_memcpy` of the movement between the first slot and the last.
    `cpu_s_per_gb` is the reader's and the owner's together; `failed` says why there are no figures."""

    path: str
    median_ms: float = 0.0
    median_gb_s: float = 0.0
    best_gb_s: float = 0.0
    of_memcpy: float = 0.0
    flow_of_memcpy: float = 0.0
    cpu_s_per_gb: float = 0.0
    failed: str = ""


class Whole(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A whole fetch as an engine waits for it (`total_ms`), and medians of its steps by the agents' own clocks: to
    decide, lease and all, to move, verify and confirm, and what the engine took to copy, which it does while later
    blocks are still moved. `lost` ones did not bring all blocks: on a busy host the owner's answer may miss the time
    that an engine waits for a decision. `times_memcpy` is the median over rounds, `best_times_memcpy` best against
    best."""

    path: str
    slots: int
    megabytes: float
    fetches: int = 0
    lost: int = 0
    steps_ms: dict[str, float] = {}
    total_ms: float = 0.0
    memcpy_ms: float = 0.0
    times_memcpy: float = 0.0
    best_times_memcpy: float = 0.0
    failed: str = ""


class Recompute(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Computing the `tokens` whose KV is as many `megabytes` as a whole fetch moves, and `by` what: an engine that ran,
    or a cost model where it could not, for the reason in `not_measured`."""

    tokens: int
    megabytes: float
    ms: float
    by: str
    not_measured: str = ""


class Report(msgspec.Struct, kw_only=True):
    """One run. `idle_cpu` is the share of a core that a process takes in which all transports wait, the reader's and
    the owner's; `unavailable` says which transports this host lacks, and why."""

    date: str
    host: str
    slots: int
    slot_bytes: int
    rounds: int
    speeds: list[Speed]
    whole: list[Whole]
    recompute: Recompute
    idle_cpu: dict[str, float]
    unavailable: dict[str, str]


def render_text(report: Report) -> str:
    """For a terminal."""
    lines = [
        f"{report.slots} slots of {report.slot_bytes:,} bytes, {report.rounds} rounds, {report.host}, {report.date}",
        "",
        f"{'path':<24}{'median':>10}{'GB/s':>8}{'best':>8}{'of memcpy':>11}{'in flow':>9}{'CPU s/GB':>10}",
    ]
    for speed in report.speeds:
        if speed.failed:
            lines.append(f"{speed.path:<24}{speed.failed}")
            continue
        lines.append(
            f"{speed.path:<24}{speed.median_ms:>7.2f} ms{speed.median_gb_s:>8.2f}{speed.best_gb_s:>8.2f}"
            f"{speed.of_memcpy:>10.0%} {speed.flow_of_memcpy or speed.of_memcpy:>8.0%} {speed.cpu_s_per_gb:>9.2f}"
        )
    for whole in report.whole:
        lines += ["", f"a whole fetch over {whole.path}: {whole.slots} slots, {whole.megabytes:.0f} MB"]
        if whole.failed:
            lines.append(f"  {whole.failed}")
            continue
        lines.append(
            f"  {whole.total_ms:.1f} ms, {whole.times_memcpy:.2f} x memcpy ({whole.memcpy_ms:.1f} ms);"
            f" best {whole.best_times_memcpy:.2f} x"
        )
        lines.append(f"  {whole.fetches} fetches, {whole.lost} more did not bring all blocks")
        lines.append("  of which " + ", ".join(f"{step} {ms:.1f}" for step, ms in whole.steps_ms.items()))
    again = report.recompute
    lines += ["", f"recomputing {again.tokens:,} tokens, {again.megabytes:.0f} MB of KV: {again.ms:,.1f} ms"]
    lines.append(f"  by {again.by}" if not again.not_measured else f"  {again.by}: {again.not_measured}")
    memcpy = [whole.memcpy_ms for whole in report.whole if whole.memcpy_ms]
    if memcpy:
        lines.append(f"  {again.ms / min(memcpy):,.0f} x memcpy ({min(memcpy):.1f} ms)")
    idle = ", ".join(f"{who} {share:.1%}" for who, share in report.idle_cpu.items())
    lines += ["", f"idle, share of a core: {idle}"]
    lines += [f"{name}: {why}" for name, why in report.unavailable.items()]
    return "\n".join(lines)

"""What the flags of a replay mean. Everything wrong is a SettingsError that begins with the flag."""

from __future__ import annotations

import argparse

from gateway.errors import SettingsError
from gateway.plan.inputs import amount, number
from gateway.replay.formats import read
from gateway.replay.physics import read_physics
from gateway.replay.policies import NAMES, policy
from gateway.replay.scenario import FETCH_LATENCY_S, Scenario
from gateway.replay.workload import Workload, build
from kvstore.cost import LinkEstimate

DEFAULT_UTILIZATION = 0.5
MAX_REPLICAS, MAX_GATEWAYS = 1024, 64


def read_scenario(options: argparse.Namespace, *, live: bool) -> Scenario:
    """The fleet to replay on; `live` traffic keeps its own times unless a utilization is given."""
    gigabytes_per_s = amount("--fetch-gigabytes-per-s", options.fetch_gigabytes_per_s, below=1e9)
    utilization = 0.0 if live else DEFAULT_UTILIZATION
    if options.utilization is not None:
        utilization = amount("--utilization", options.utilization, below=100)
    return Scenario(
        physics=read_physics(
            options.model,
            number("--tflops", options.tflops) * 1e12 if options.tflops else None,
            number("--hbm-gigabytes-per-s", options.hbm_gigabytes_per_s) * 1e9 if options.hbm_gigabytes_per_s else None,
        ),
        replicas=whole("--replicas", options.replicas, 1, MAX_REPLICAS),
        cache_tokens=whole("--cache-tokens", options.cache_tokens, 1, 1 << 40),
        utilization=utilization,
        seed=whole("--seed", options.seed, 0, 1 << 62),
        gateways=whole("--gateways", options.gateways, 1, MAX_GATEWAYS),
        report_delay_s=amount("--report-delay", options.report_delay, below=3600),
        estimate_error=amount("--estimate-error", options.estimate_error, below=10),
        link=LinkEstimate(FETCH_LATENCY_S, gigabytes_per_s * 1e9) if gigabytes_per_s else None,
        keeps_copies=options.keep_copies,
    )


def read_workload(options: argparse.Namespace) -> Workload:
    """The traffic to replay. Raises TraceError, too."""
    per_replica = amount("--sessions-per-replica", options.sessions_per_replica, below=1e9)
    sessions = int(per_replica * whole("--replicas", options.replicas, 1, MAX_REPLICAS))
    if per_replica and not sessions:
        raise SettingsError(f"--sessions-per-replica: {options.sessions_per_replica} is less than one session in all")
    seed = whole("--seed", options.seed, 0, 1 << 62)
    return build(read(options.trace), sessions=sessions, spread=options.spread_timestamps, seed=seed)


def read_policies(text: str) -> list[str]:
    """The names in a list with commas, or all there are."""
    names = list(NAMES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        policy(name)
    return names


def whole(flag: str, text: str, least: int, most: int) -> int:
    """A whole number of `least` to `most`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise SettingsError(f"{flag}: expected a whole number from {least} to {most}, got {text!r}")
    return value

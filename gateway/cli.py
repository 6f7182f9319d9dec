"""The `prefix-gateway` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.errors import GatewayError

if TYPE_CHECKING:
    from gateway.settings import Settings

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 0, 1 for a failed check, 2 for a bad configuration."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in _PROCESSES:
        return _become(_PROCESSES[arguments[0]], arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except GatewayError as error:
        print(f"prefix-gateway: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has read enough; what is buffered must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


_PROCESSES = {"agent": "replica_agent", "engine": "replica_agent.reference", "bench": "replica_agent.bench"}
"""Subcommands that are programs of their own: started as processes, never imported."""


def _become(module: str, arguments: list[str]) -> int:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefix-gateway", description="Routes LLM requests to the replica that already holds their KV cache."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="run the gateway")
    _add_replica_options(serve)
    serve.add_argument("--host", help="public address (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="public port (default 8000)")
    serve.add_argument("--admin-host", help="admin address (default 127.0.0.1)")
    serve.add_argument("--admin-port", type=int, help="admin port (default 8001)")
    serve.add_argument("--log-level", help="debug, info, warning or error (default info)")
    serve.add_argument("--request-log", metavar="FILE", help="write every request into this file, for `replay`")
    serve.add_argument("--hash-prompts", action="store_true", help="write hashes of prompts instead of their text")
    serve.add_argument("--observe-only", action="store_true", help="follow the agents and report; take no requests")
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="three replicas, agents and a gateway on this machine, and a scenario")
    from gateway.demo.options import add_options

    add_options(demo)
    demo.set_defaults(run=_demo)

    report = commands.add_parser("report", help="print the duplication report of a running gateway")
    report.add_argument("--admin", default="http://127.0.0.1:8001", metavar="URL", help="the gateway's admin address")
    report.add_argument("--top", type=int, default=10, help="shared prefixes to list")
    report.add_argument("--json", action="store_true", help="the report as JSON")
    report.set_defaults(run=_report)

    plan = commands.add_parser("plan", help="what a model's KV costs: per GPU, and to fetch or to recompute")
    from gateway.plan.options import add_options as add_plan_options

    add_plan_options(plan)
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="check a deployment, and name each misconfiguration with its fix")
    _add_replica_options(doctor)
    from gateway.doctor.options import add_options as add_doctor_options

    add_doctor_options(doctor)
    doctor.set_defaults(run=_doctor)

    replay = commands.add_parser("replay", help="what recorded traffic would have done, under each way of placing it")
    from gateway.replay.options import add_options as add_replay_options

    add_replay_options(replay)
    replay.set_defaults(run=_replay)

    for name, module in _PROCESSES.items():
        commands.add_parser(name, help=f"run python -m {module}; see its --help", add_help=False)
    return parser


def _add_replica_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML configuration")
    parser.add_argument(
        "--engine", action="append", metavar="URL", help="an engine; repeatable; instead of replicas in the file"
    )
    parser.add_argument("--agent", action="append", metavar="URL", help="agents of the engines, in the same order")


def _settings(options: argparse.Namespace, overrides: dict[str, Any]) -> Settings:
    """Of `_add_replica_options`; `overrides` has what other flags say. Raises SettingsError."""
    from gateway.settings import load_settings

    if options.engine:
        overrides["replicas"] = _replicas(options.engine, options.agent or [])
    elif options.agent:
        raise _usage("--agent needs an --engine for each")
    settings = load_settings(options.config, os.environ, overrides)
    if not settings.replicas:
        raise _usage("replicas: none configured; give --engine URL or a --config with replicas")
    return settings


def _serve(options: argparse.Namespace) -> int:
    listen = {key: getattr(options, key) for key in ("host", "port", "admin_host", "admin_port")}
    overrides: dict[str, Any] = {"listen": {key: value for key, value in listen.items() if value is not None}}
    telemetry = {key: getattr(options, key) for key in ("log_level", "request_log", "hash_prompts")}
    overrides["telemetry"] = {key: value for key, value in telemetry.items() if value}
    if options.observe_only:
        overrides["observe_only"] = True
    settings = _settings(options, overrides)
    from gateway.serve import run

    run(settings)
    return 0


def _replicas(engines: list[str], agents: list[str]) -> list[dict[str, str]]:
    if agents and len(agents) != len(engines):
        raise _usage(f"--agent: {len(agents)} given for {len(engines)} engines")
    replicas = [{"id": f"replica-{at}", "engine": url} for at, url in enumerate(engines)]
    for replica, agent in zip(replicas, agents, strict=False):
        replica["agent"] = agent
    return replicas


def _usage(message: str) -> GatewayError:
    from gateway.errors import SettingsError

    return SettingsError(message)


def _demo(options: argparse.Namespace) -> int:
    from gateway.demo.run import run

    return run(options)


def _plan(options: argparse.Namespace) -> int:
    print(options.plan(options))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    import msgspec

    from gateway.doctor.report import render_text
    from gateway.doctor.run import examine

    diagnosis = examine(_settings(options, {}), probe=options.probe, timeout_s=options.timeout)
    print(msgspec.json.encode(diagnosis).decode() if options.json else render_text(diagnosis))
    return 0 if diagnosis.ok else 1


def _replay(options: argparse.Namespace) -> int:
    from gateway.replay.run import run

    return run(options, lambda line: print(line, flush=True))


def _report(options: argparse.Namespace) -> int:
    import httpx
    import msgspec

    from gateway.duplication.report import DuplicationReport, render_text

    try:
        response = httpx.get(f"{options.admin}/admin/duplication", params={"top": options.top}, trust_env=False)
        response.raise_for_status()
        report = msgspec.json.decode(response.content, type=DuplicationReport)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, msgspec.MsgspecError, RecursionError) as error:
        print(f"prefix-gateway: --admin {options.admin}: {error}", file=sys.stderr)
        return 1
    print(response.text if options.json else render_text(report))
    return 0

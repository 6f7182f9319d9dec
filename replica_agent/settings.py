"""What an agent is told at its start: flags, and `REPLICA_AGENT_*` variables under the same names.

A flag wins over a variable, a variable over the default. The token and the engine's API key are secrets and come from
`REPLICA_AGENT_TOKEN` and `REPLICA_AGENT_ENGINE_API_KEY` or from files, never from a flag. A bad value, a file that
cannot be used or an unknown variable stops the start and is named.
"""

from __future__ import annotations

import argparse
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvstore.client_tls import client_context
from kvstore.errors import TlsFileUnusable
from kvstore.server_tls import server_context
from replica_agent.errors import SettingsError
from replica_agent.tls import AgentTls

ENV_PREFIX = "REPLICA_AGENT_"

TRANSPORTS = ("shm", "nixl", "tcp", "nixl-push")
"""`kvstore.transfer.select.NAMES`, which a test compares; imported by those who have a pool alone."""

MAX_SOCKET_PATH = 100
"""The kernel takes 107 bytes; the socket is made under a longer name and then renamed."""

# A Kubernetes Service called "replica-agent" makes the kubelet put such variables into every pod of its namespace.
_KUBERNETES_OWN = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT_\d+_.*)$")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an agent is told. Endpoints are ZMQ (`tcp://host:port`), `engine` is the engine's base URL.

    `kv_replay` and `model_dir` are None when there is none; `model` overrides the name under which the engine serves
    its base model; `route_seed` (u64) is the deployment's and must be the gateways'. `kv_socket` is None for an agent
    without a pool; what follows it in KEYS means nothing then. `transports` are tried in that order. `engine_tls` is
    None where the engine's URL is http; `engine_server_name` is "" where its certificate names the URL's host. `tls` is
    the agent's own, None where it serves plain HTTP.
    """

    engine: str
    engine_api_key: str | None
    engine_tls: ssl.SSLContext | None
    engine_server_name: str
    kv_events: str
    kv_replay: str | None
    kv_topic: str
    host: str
    port: int
    replica_id: str
    dp_rank: int
    route_seed: int
    model: str | None
    model_dir: Path | None
    token: str | None
    tls: AgentTls | None
    poll_interval_s: float
    heartbeat_interval_s: float
    stream_buffer_bytes: int
    max_orphans: int
    kv_socket: Path | None
    pool_bytes: int
    fetch: str
    fetch_margin: float
    transports: tuple[str, ...]
    data_port: int
    data_advertise: tuple[str, int] | None
    lease_ttl_s: float
    log_level: str
    debug: bool


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _optional(value: str) -> str | None:
    return value or None


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://host:port, got {value!r}")
    return value.rstrip("/")


def _endpoint(value: str) -> str:
    if not re.match(r"(tcp://[^\s/]+:\d+|ipc://.+)$", value):
        raise ValueError(f"expected tcp://host:port or ipc://path, got {value!r}")
    return value.replace("tcp://*:", "tcp://127.0.0.1:")


def _optional_endpoint(value: str) -> str | None:
    return _endpoint(value) if value else None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value, 0)
        except ValueError:
            raise ValueError(f"expected an integer, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"expected {low} to {high}, got {number}")
        return number

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"expected seconds, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"expected {low} to {high} seconds, got {value}")
        return number

    return parse


def _margin(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"expected a share, got {value!r}") from None
    if not -1_000 <= number < 1:
        raise ValueError(f"expected -1000 to below 1, got {value}")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}, got {value!r}")
        return value

    return parse


def _switch(value: str) -> bool:
    return _one_of("on", "off")(value) == "on"


def _transports(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(TRANSPORTS):
        raise ValueError(f"expected different ones of {', '.join(TRANSPORTS)}, got {value!r}")
    return names


def _socket_path(value: str) -> Path | None:
    if len(value.encode()) > MAX_SOCKET_PATH:
        raise ValueError(f"a Unix socket's path has at most {MAX_SOCKET_PATH} bytes, got {len(value.encode())}")
    return Path(value) if value else None


def _address(value: str) -> tuple[str, int] | None:
    if not value:
        return None
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != value or parts.username is not None:
        raise ValueError(f"expected host:port, got {value!r}")
    return host, port


def _directory(value: str) -> Path | None:
    if not value:
        return None
    path = Path(value)
    if not path.is_dir():
        raise ValueError(f"no such directory: {value}")
    return path


class _Key(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    default: str | None
    help: str


KEYS = (
    _Key("engine", _url, None, "base URL of the engine, such as http://127.0.0.1:8100"),
    _Key("engine_api_key_file", str, "", "file with the API key that the engine asks for"),
    _Key("engine_ca_file", str, "", "PEM file with the authority of the engine's certificate; default: the system's"),
    _Key("engine_cert_file", str, "", "PEM file with the agent's own certificate, for an engine that asks for one"),
    _Key("engine_key_file", str, "", "PEM file with the key of --engine-cert-file"),
    _Key("engine_server_name", str, "", "name in the engine's certificate, where it is not the URL's host"),
    _Key("kv_events", _endpoint, "tcp://127.0.0.1:5557", "where the engine publishes its KV events"),
    _Key(
        "kv_replay", _optional_endpoint, "", "where the engine replays them; without it every gap empties the catalogue"
    ),
    _Key("kv_topic", str, "", "topic prefix to subscribe to"),
    _Key("host", _text, "127.0.0.1", "address to listen on"),
    _Key("port", _integer(0, 65535), "8200", "port to listen on; 0 takes a free one"),
    _Key("replica_id", _text, "replica-0", "stable name of this replica"),
    _Key("dp_rank", _integer(0, 65535), "0", "data-parallel rank of the engine that this agent speaks for"),
    _Key("route_seed", _integer(0, 2**64 - 1), "0", "the deployment's seed, the same on every gateway and agent"),
    _Key("model", _optional, "", "name of the base model as served; default: what the engine says"),
    _Key("model_dir", _directory, "", "directory with the model's tokenizer files; default: what the engine says"),
    _Key("poll_interval", _seconds(0.01, 60), "0.25", "seconds between looks at the engine's metrics"),
    _Key("heartbeat_interval", _seconds(0.01, 60), "0.25", "longest time between two heartbeats, seconds"),
    _Key(
        "stream_buffer_bytes", _integer(65536, 2**34), "16777216", "bytes a report stream may lag before it is closed"
    ),
    _Key("max_orphans", _integer(0, 2**24), "65536", "blocks kept aside whose chain to the root is unknown"),
    _Key("kv_socket", _socket_path, "", "Unix socket where the engine reaches the KV pool; empty: no pool, no fetch"),
    _Key(
        "pool_bytes",
        _integer(2**16, 2**50),
        "1073741824",
        "bytes of shared memory for KV blocks, taken when the engine connects",
    ),
    _Key(
        "fetch",
        _one_of("on", "shadow", "off"),
        "on",
        "on: fetch KV from peers where that beats computing it; shadow: only record what would be fetched; off: never",
    ),
    _Key(
        "fetch_margin",
        _margin,
        "0.1",
        "share of the time to recompute by which a fetch must be cheaper; below 0 it may be dearer, to measure it",
    ),
    _Key("transports", _transports, "shm,nixl,tcp", "ways to fetch, in order of preference"),
    _Key("data_port", _integer(0, 65535), "0", "port of the tcp transport, on --host; 0 takes a free one"),
    _Key(
        "data_advertise",
        _address,
        "",
        "host:port where peers reach the tcp transport; default: --data-port on this host",
    ),
    _Key("lease_ttl", _seconds(0.5, 30), "10", "seconds for which a peer is asked to hold the blocks being fetched"),
    _Key("log_level", _one_of("debug", "info", "warning", "error"), "info", "debug, info, warning or error"),
    _Key("debug", _switch, "off", "on: serve /debug/check, which looks at every block the agent knows"),
    _Key("token_file", str, "", "file with the token that /v1/* asks for"),
    _Key(
        "tls_cert_file", str, "", "PEM file with the agent's certificate: it then serves https, and shows it to peers"
    ),
    _Key("tls_key_file", str, "", "PEM file with the key of --tls-cert-file"),
    _Key("tls_ca_file", str, "", "PEM file with the authority that clients of /v1/* and peers must have theirs from"),
    _Key("tls_server_name", str, "", "name in the peers' certificates, where it is not the host of their URLs"),
)


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags and variables. Raises SettingsError; argparse exits on `--help` and unknown flags."""
    parser = argparse.ArgumentParser(
        prog="replica_agent",
        description="Reports which prefixes one engine holds, and keeps its KV pool.",
        allow_abbrev=False,
    )
    for key in KEYS:
        default = f" (default {key.default})" if key.default else ""
        parser.add_argument(f"--{key.name.replace('_', '-')}", dest=key.name, help=key.help + default)
    flags = vars(parser.parse_args(argv))
    _refuse_unknown(environ)
    values = {key.name: _value(key, flags[key.name], environ) for key in KEYS}
    return Settings(
        engine=values["engine"],
        engine_api_key=_secret(environ, "engine_api_key", values["engine_api_key_file"]),
        engine_tls=_engine_tls(values),
        engine_server_name=values["engine_server_name"],
        kv_events=values["kv_events"],
        kv_replay=values["kv_replay"],
        kv_topic=values["kv_topic"],
        host=values["host"],
        port=values["port"],
        replica_id=values["replica_id"],
        dp_rank=values["dp_rank"],
        route_seed=values["route_seed"],
        model=values["model"],
        model_dir=values["model_dir"],
        token=_secret(environ, "token", values["token_file"]),
        tls=_agent_tls(values),
        poll_interval_s=values["poll_interval"],
        heartbeat_interval_s=values["heartbeat_interval"],
        stream_buffer_bytes=values["stream_buffer_bytes"],
        max_orphans=values["max_orphans"],
        kv_socket=values["kv_socket"],
        pool_bytes=values["pool_bytes"],
        fetch=values["fetch"],
        fetch_margin=values["fetch_margin"],
        transports=values["transports"],
        data_port=values["data_port"],
        data_advertise=values["data_advertise"],
        lease_ttl_s=values["lease_ttl"],
        log_level=values["log_level"],
        debug=values["debug"],
    )


def _value(key: _Key, flag: str | None, environ: Mapping[str, str]) -> Any:
    variable = ENV_PREFIX + key.name.upper()
    if flag is not None:
        source, text = f"--{key.name.replace('_', '-')}", flag
    elif variable in environ:
        source, text = variable, environ[variable]
    elif key.default is not None:
        return key.parse(key.default)
    else:
        raise SettingsError(f"--{key.name.replace('_', '-')}", f"required: {key.help}")
    try:
        return key.parse(text)
    except ValueError as error:
        raise SettingsError(source, str(error)) from None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {key.name.upper() for key in KEYS} | {"TOKEN", "ENGINE_API_KEY"}
    for variable in environ:
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in known and not _KUBERNETES_OWN.match(name):
            raise SettingsError(variable, f"no such setting; known: {', '.join(sorted(known))}")


def _secret(environ: Mapping[str, str], name: str, file: str) -> str | None:
    flag, variable = f"--{name.replace('_', '-')}-file", ENV_PREFIX + name.upper()
    if not file:
        given = environ.get(variable)
        if given is not None and not given.strip():
            raise SettingsError(variable, "set but empty")
        return _header_safe(variable, given.strip()) if given else None
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise SettingsError(flag, f"cannot be read: {error}") from error
    if not text:
        raise SettingsError(flag, f"is empty: {file}")
    return _header_safe(flag, text)


def _header_safe(source: str, secret: str) -> str:
    if not secret.isascii() or not secret.isprintable():
        raise SettingsError(source, "must be printable ASCII, on one line")
    return secret


def _agent_tls(values: Mapping[str, Any]) -> AgentTls | None:
    files = {argument: values[f"tls_{argument}"] for argument in ("ca_file", "cert_file", "key_file")}
    if not any(files.values()):
        return None
    try:
        return AgentTls(
            server=server_context(**files),
            data=server_context(**files, require=True),
            client=client_context(**files),
            server_name=values["tls_server_name"],
            required=bool(files["ca_file"]),
        )
    except TlsFileUnusable as error:
        raise SettingsError(f"--tls-{error.argument.replace('_', '-')}", error.problem) from error


def _engine_tls(values: Mapping[str, Any]) -> ssl.SSLContext | None:
    files = {argument: values[f"engine_{argument}"] for argument in ("ca_file", "cert_file", "key_file")}
    if urlsplit(values["engine"]).scheme == "http":
        for argument, file in files.items():
            if file:
                raise SettingsError(f"--engine-{argument.replace('_', '-')}", f"{values['engine']} is not https")
        return None
    try:
        return client_context(**files)
    except TlsFileUnusable as error:
        raise SettingsError(f"--engine-{error.argument.replace('_', '-')}", error.problem) from error

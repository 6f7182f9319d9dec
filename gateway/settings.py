"""The gateway's configuration: one YAML file, every key overridable from the environment, read once at start.

`PREFIX_GATEWAY_<SECTION>__<KEY>` overrides a key of a section; `PREFIX_GATEWAY_REPLICAS` replaces the list (YAML or
JSON), `PREFIX_GATEWAY_OBSERVE_ONLY` the switch. An unknown key or a bad value stops the start and names the key.
Secrets are never flags and never in the YAML: the agents' token comes from `PREFIX_GATEWAY_AGENT_TOKEN`, the engines'
API key from `PREFIX_GATEWAY_ENGINE_API_KEY`, or each from the file that the same name with `_FILE` names; the key of
one engine from its replica's `api_key_file`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import yaml

from gateway.errors import SettingsError
from kvstore.hint import MAX_DEADLINE_MS

ENV_PREFIX = "PREFIX_GATEWAY_"
MAX_WEIGHT = 100
"""A weight buys points on the ring: 512 for each 1."""
MIN_INDEX_BYTES = 16 << 20

MAX_DP_RANK = 65_535

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SECRETS = ("agent_token", "engine_api_key")


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens: the OpenAI endpoint for clients, and the admin API for operators.

    `name` is what agents and the other gateways of the deployment know it by; "" is its host's name and port.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    name: str = ""


class EngineTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS to engines, or to agents, whose URL is https. PEM files: `ca_file` instead of the system's authorities;
    `cert_file` and `key_file` for those that ask who calls. `server_name` is what their certificate says, where that is
    not the URL's host. "" is none."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. `id` is its stable identity on the ring; `agent` is absent for an engine without a sidecar.

    `dp_rank` is the data-parallel rank that it is behind its engine's URL, which other ranks share. `api_key_file` and
    `engine_tls` are for an engine that differs from the others; the latter replaces the section of that name whole.
    """

    id: str
    engine: str
    agent: str | None = None
    weight: float = 1.0
    dp_rank: int | None = None
    api_key_file: str = ""
    engine_tls: EngineTls | None = None


class PlacementSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`epsilon`: how far above the mean a replica's load may go; `route_seed`: seed of all RouteKeys of a deployment;
    `allow_pinning`: whether a client may choose its replica with the header `x-gateway-pin`, and forbid a fetch with
    `x-gateway-fetch: off`; `index_bytes`: the memory in which is kept what replicas hold;
    `slow_start_s`: in which time a replica that comes up with an empty cache gets its full share of the load, 0: at
    once."""

    epsilon: float = 1.0
    route_seed: int = 0
    allow_pinning: bool = False
    index_bytes: int = 1 << 30
    slow_start_s: float = 30.0


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`enabled`: whether replicas are told to fetch KV from their peers; `margin`: by which share a fetch must be
    expected to beat recomputing; `max_deadline_ms`: the longest a request may wait for one."""

    enabled: bool = True
    margin: float = 0.1
    max_deadline_ms: int = 30_000


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what a client or a replica can make the gateway hold or wait for."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_concurrent_requests: int = 1024
    body_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    identity_timeout_s: float = 2.0
    retry_budget: float = 0.2
    drain_timeout_s: int = 30


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`observe_usage`: ask for usage on streams that do not, and drop the chunk that carries it; `request_log`: a file
    to write every request into, for `replay` ("": none), with `hash_prompts` without its text."""

    otlp_endpoint: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    observe_usage: bool = True
    receipts: int = 10_000
    parity_sample_every: int = 256
    request_log: str = ""
    hash_prompts: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. `tls` is for agents, `engine_tls` for engines. `observe_only`: follow the agents and
    report, but take no requests."""

    observe_only: bool = False
    listen: ListenSettings = ListenSettings()
    replicas: list[ReplicaSettings] = []
    engine_tls: EngineTls = EngineTls()
    tls: EngineTls = EngineTls()
    placement: PlacementSection = PlacementSection()
    fetch: FetchSettings = FetchSettings()
    limits: LimitSettings = LimitSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    agent_token: str = ""
    engine_api_key: str = ""


def load_settings(
    path: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """File, then environment, then `overrides` (from flags; same nesting as the file); the later wins.

    Raises SettingsError naming the key.
    """
    tree = _read(path) if path is not None else {}
    for secret in _SECRETS:
        if secret in tree:
            variable = ENV_PREFIX + secret.upper()
            raise SettingsError(f"{secret}: secrets come from {variable} or {variable}_FILE, not from the config")
    _apply_environment(tree, environ)
    for section, value in (overrides or {}).items():
        if isinstance(value, Mapping):
            within = tree.setdefault(section, {})
            if not isinstance(within, dict):
                raise SettingsError(f"{section}: expected keys and values, got {within!r}")
            within.update(value)
        else:
            tree[section] = value
    tree |= {secret: _secret(secret, environ) for secret in _SECRETS}
    try:
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(field_first(str(error))) from error
    _check(settings)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"--config {path}: expected sections, got {type(tree).__name__}")
    return {section: value for section, value in tree.items() if value is not None}


def _apply_environment(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    secrets = {ENV_PREFIX + secret.upper() + suffix for secret in _SECRETS for suffix in ("", "_FILE")}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name in secrets:
            continue
        section, separator, key = name[len(ENV_PREFIX) :].lower().partition("__")
        if section not in Settings.__struct_fields__ or section in _SECRETS:
            raise SettingsError(f"{name}: no such section: {section}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SettingsError(f"{name}: not a value: {' '.join(str(error).split())}") from error
        if not separator:
            tree[section] = value
            continue
        if section == "observe_only":
            raise SettingsError(f"{name}: observe_only is a switch and has no keys")
        within = tree.setdefault(section, {})
        if not isinstance(within, dict):
            raise SettingsError(f"{name}: {section} is a list and has no keys")
        within[key] = value


def _secret(secret: str, environ: Mapping[str, str]) -> str:
    variable = ENV_PREFIX + secret.upper()
    if file := environ.get(f"{variable}_FILE"):
        return read_secret(f"{variable}_FILE", file)
    return _checked_secret(variable, environ.get(variable, ""))


def read_secret(where: str, file: str) -> str:
    """The one line of a file. Raises SettingsError, beginning with `where`."""
    where = f"{where}: {file}"
    try:
        text = Path(file).read_text().strip()
    except OSError as error:
        raise SettingsError(f"{where}: {error.strerror}") from error
    except ValueError as error:  # not text, or no path at all
        raise SettingsError(f"{where}: {error}") from error
    if not text:
        raise SettingsError(f"{where}: is empty")
    return _checked_secret(where, text)


def _checked_secret(where: str, text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise SettingsError(f"{where}: a token is printable ASCII")
    return text


def field_first(message: str) -> str:
    """msgspec's message with the key first: "listen.port: Expected `int`, got `str`"."""
    text, separator, where = message.rpartition(" - at `$")
    if not separator:
        return message
    return f"{where.rstrip('`').lstrip('.') or 'configuration'}: {text}"


def _check(settings: Settings) -> None:
    if settings.observe_only and settings.replicas and all(replica.agent is None for replica in settings.replicas):
        raise SettingsError("observe_only: no replica has an agent, so there is nothing to observe")
    seen: set[str] = set()
    sharing: dict[tuple[str, int | None], dict[int | None, str]] = {}
    for at, replica in enumerate(settings.replicas):
        where = f"replicas[{at}]"
        if replica.id in seen or not _ID.fullmatch(replica.id):
            raise SettingsError(f"{where}.id: {replica.id!r} must be unique, of letters, digits and . _ : - only")
        seen.add(replica.id)
        _check_url(f"{where}.engine", replica.engine)
        if replica.agent is not None:
            _check_url(f"{where}.agent", replica.agent)
        if not 0 < replica.weight <= MAX_WEIGHT:
            raise SettingsError(f"{where}.weight: must be above 0 and at most {MAX_WEIGHT}, got {replica.weight}")
        if replica.dp_rank is not None and not 0 <= replica.dp_rank <= MAX_DP_RANK:
            raise SettingsError(f"{where}.dp_rank: must be between 0 and {MAX_DP_RANK}, got {replica.dp_rank}")
        url = httpx.URL(replica.engine)
        ranks = sharing.setdefault((url.host, url.port), {})
        if ranks and (replica.dp_rank in ranks or None in (replica.dp_rank, *ranks)):
            others = ", ".join(f"{id}: {rank}" for rank, id in ranks.items())
            raise SettingsError(f"{where}.dp_rank: replicas that share an engine need one each, beside {others}")
        ranks[replica.dp_rank] = replica.id
    for section, key in (("listen", "port"), ("listen", "admin_port")):
        port = getattr(getattr(settings, section), key)
        if not 0 <= port <= 65_535:
            raise SettingsError(f"{section}.{key}: must be between 0 and 65535, got {port}")
    if settings.listen.name and not _ID.fullmatch(settings.listen.name):
        raise SettingsError(f"listen.name: {settings.listen.name!r} must be at most 128 letters, digits and . _ : -")
    if not 0 < settings.placement.epsilon < math.inf:
        raise SettingsError(f"placement.epsilon: must be above 0, got {settings.placement.epsilon}")
    if not 0 <= settings.placement.route_seed < 1 << 64:
        raise SettingsError(f"placement.route_seed: must be in [0, 2**64), got {settings.placement.route_seed}")
    if settings.placement.index_bytes < MIN_INDEX_BYTES:
        raise SettingsError(
            f"placement.index_bytes: must be at least {MIN_INDEX_BYTES}, got {settings.placement.index_bytes}"
        )
    if not 0 <= settings.placement.slow_start_s < math.inf:
        raise SettingsError(f"placement.slow_start_s: must be at least 0, got {settings.placement.slow_start_s}")
    fetch = settings.fetch
    if not 0 <= fetch.margin < 1:
        raise SettingsError(f"fetch.margin: must be at least 0 and below 1, got {fetch.margin}")
    if not 1 <= fetch.max_deadline_ms <= MAX_DEADLINE_MS:
        raise SettingsError(
            f"fetch.max_deadline_ms: must be between 1 and {MAX_DEADLINE_MS}, got {fetch.max_deadline_ms}"
        )
    limits = settings.limits
    for key in (
        "max_body_bytes",
        "max_concurrent_requests",
        "body_timeout_s",
        "connect_timeout_s",
        "first_byte_timeout_s",
        "drain_timeout_s",
    ):
        if not 0 < getattr(limits, key) < math.inf:
            raise SettingsError(f"limits.{key}: must be above 0, got {getattr(limits, key)}")
    if not 0 < limits.identity_timeout_s < math.inf:
        raise SettingsError(f"limits.identity_timeout_s: must be above 0, got {limits.identity_timeout_s}")
    if not 0 <= limits.retry_budget <= 1:
        raise SettingsError(f"limits.retry_budget: must be between 0 and 1, got {limits.retry_budget}")
    if settings.telemetry.parity_sample_every < 0:
        raise SettingsError("telemetry.parity_sample_every: must be 0 (off) or above")
    if settings.telemetry.receipts < 1:
        raise SettingsError(f"telemetry.receipts: must be above 0, got {settings.telemetry.receipts}")


def _check_url(where: str, url: str) -> None:
    try:
        parts = httpx.URL(url)
        usable = parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0
        usable = usable and parts.path == "/" and not parts.query and not parts.fragment and not parts.userinfo
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise SettingsError(f"{where}: expected http://host:port, got {url!r}")

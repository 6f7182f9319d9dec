"""The chart's configuration file is one that the gateway loads, with the values that were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from helm_rendering import CHART, Render, Rendered, Values

from gateway.settings import (
    EngineTls,
    FetchSettings,
    LimitSettings,
    PlacementSection,
    ReplicaSettings,
    Settings,
    TelemetrySettings,
    load_settings,
)

REPLICA: Values = {"id": "replica-0", "engine": "http://engine-0:8100", "agent": "http://engine-0:8200", "weight": 2.5}


def load(rendered: Rendered, tmp_path: Path) -> Settings:
    """What the gateway in the pod would run with."""
    file = tmp_path / "config.yaml"
    file.write_text(rendered.find("ConfigMap")["data"]["config.yaml"])
    return load_settings(file, {})


def test_default_configuration_is_the_gateways_own(render: Render, tmp_path: Path) -> None:
    loaded, default = load(render(), tmp_path), Settings()
    assert (loaded.engine_tls, loaded.tls, loaded.placement, loaded.fetch, loaded.limits, loaded.telemetry) == (
        default.engine_tls,
        default.tls,
        default.placement,
        default.fetch,
        default.limits,
        default.telemetry,
    )
    assert (loaded.replicas, loaded.observe_only) == ([], False)


def test_observe_only(render: Render, tmp_path: Path) -> None:
    assert load(render(config={"replicas": [REPLICA], "observe_only": True}), tmp_path).observe_only is True


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("engine_tls", EngineTls),
        ("tls", EngineTls),
        ("placement", PlacementSection),
        ("fetch", FetchSettings),
        ("limits", LimitSettings),
        ("telemetry", TelemetrySettings),
    ],
)
def test_values_offer_every_key_of_the_gateway(section: str, settings: type[msgspec.Struct]) -> None:
    schema = msgspec.json.decode((CHART / "values.schema.json").read_bytes())
    keys = set(settings.__struct_fields__)
    assert set(schema["properties"]["config"]["properties"][section]["properties"]) == keys
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())["config"][section]) == keys


def test_listens_on_all_addresses_of_the_pod(render: Render, tmp_path: Path) -> None:
    rendered = render()
    listen = load(rendered, tmp_path).listen
    assert (listen.host, listen.admin_host) == ("0.0.0.0", "0.0.0.0")
    ports = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    assert ports == {"http": listen.port, "admin": listen.admin_port}


def test_values_offer_every_key_of_a_replica() -> None:
    schema = msgspec.json.decode((CHART / "values.schema.json").read_bytes())
    replica = schema["properties"]["config"]["properties"]["replicas"]["items"]["properties"]
    assert set(replica) == set(ReplicaSettings.__struct_fields__)


def test_replicas(render: Render, tmp_path: Path) -> None:
    bare: Values = {"id": "replica-1", "engine": "https://engine-1:8100"}
    tls: Values = {"ca_file": "/etc/engine-tls/ca.crt", "server_name": "engine"}
    other: Values = {"id": "replica-2", "engine": "https://engine-1:8101", "dp_rank": 0, "api_key_file": "/etc/key"}
    loaded = load(render(config={"replicas": [REPLICA, bare, other | {"engine_tls": tls}]}), tmp_path)
    assert loaded.replicas == [
        ReplicaSettings(**REPLICA),
        ReplicaSettings(**bare),
        ReplicaSettings(**other, engine_tls=EngineTls(**tls)),
    ]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("engine_tls", "ca_file", "/etc/engine-tls/ca.crt"),
        ("engine_tls", "cert_file", "/etc/engine-tls/tls.crt"),
        ("engine_tls", "key_file", "/etc/engine-tls/tls.key"),
        ("engine_tls", "server_name", "engine"),
        ("tls", "ca_file", "/etc/agents/ca.crt"),
        ("tls", "server_name", "agent"),
        ("placement", "epsilon", 0.25),
        ("placement", "route_seed", 0),
        ("placement", "route_seed", 2**53 - 1),
        ("placement", "allow_pinning", True),
        ("placement", "index_bytes", 1 << 24),
        ("placement", "index_bytes", 1 << 36),
        ("placement", "slow_start_s", 0),
        ("placement", "slow_start_s", 2.5),
        ("fetch", "enabled", False),
        ("fetch", "margin", 0),
        ("fetch", "max_deadline_ms", 1),
        ("limits", "max_body_bytes", 1 << 40),
        ("limits", "max_concurrent_requests", 1),
        ("limits", "body_timeout_s", 3.5),
        ("limits", "connect_timeout_s", 0.5),
        ("limits", "first_byte_timeout_s", 1.5),
        ("limits", "identity_timeout_s", 0.1),
        ("limits", "retry_budget", 0),
        ("limits", "drain_timeout_s", 5),
        ("telemetry", "otlp_endpoint", "http://collector:4318"),
        ("telemetry", "log_level", "debug"),
        ("telemetry", "observe_usage", False),
        ("telemetry", "receipts", 1),
        ("telemetry", "parity_sample_every", 0),
        ("telemetry", "request_log", "/log/requests.jsonl"),
        ("telemetry", "hash_prompts", True),
    ],
)
def test_configuration_value_reaches_the_gateway(
    render: Render, tmp_path: Path, section: str, key: str, value: Any
) -> None:
    rendered = render(config={section: {key: value}})
    assert rendered.config[section][key] == value
    assert getattr(getattr(load(rendered, tmp_path), section), key) == value


def test_gateways_of_one_release_differ_by_their_pods_names_alone(render: Render, tmp_path: Path) -> None:
    """And so have one ring: it is made of the replicas' ids and weights."""
    rendered = render(replicaCount=3, config={"replicas": [REPLICA]})
    assert rendered.find("Deployment")["spec"]["replicas"] == 3
    (name,) = [each for each in rendered.container["env"] if each["name"] == "PREFIX_GATEWAY_LISTEN__NAME"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    file = tmp_path / "config.yaml"
    file.write_text(rendered.find("ConfigMap")["data"]["config.yaml"])
    pods = ["prefix-gateway-5d8f6c7b9d-x2x4z", "prefix-gateway-5d8f6c7b9d-77777"]
    loaded = [load_settings(file, {name["name"]: pod}) for pod in pods]
    assert [each.listen.name for each in loaded] == pods
    assert msgspec.structs.replace(loaded[0], listen=loaded[1].listen) == loaded[1]


def test_a_secret_with_the_agents_certificates_is_mounted_and_named(render: Render, tmp_path: Path) -> None:
    rendered = render(agentTls={"existingSecret": "agents"}, config={"tls": {"server_name": "agent"}})
    loaded = load(rendered, tmp_path).tls
    (mount,) = [each for each in rendered.container["volumeMounts"] if each["name"] == "agent-tls"]
    for file, name in ((loaded.ca_file, "ca.crt"), (loaded.cert_file, "tls.crt"), (loaded.key_file, "tls.key")):
        assert file == f"{mount['mountPath']}/{name}"
    assert (mount["readOnly"], loaded.server_name) == (True, "agent")
    pod = rendered.find("Deployment")["spec"]["template"]["spec"]
    assert {"name": "agent-tls", "secret": {"secretName": "agents"}} in pod["volumes"]


def test_configuration_change_rolls_the_pods(render: Render) -> None:
    before, same = render(), render(podLabels={"team": "serving"})
    after = render(config={"limits": {"retry_budget": 0}})
    assert before.checksum == same.checksum
    assert before.checksum != after.checksum

"""Values that cannot work are refused before anything is installed, and the message names the key."""

from __future__ import annotations

from typing import Any

import pytest
from helm_rendering import Rejected, Template, Values

REPLICA = {"id": "replica-0", "engine": "http://engine-0:8100"}


def nested(path: str, value: Any) -> Values:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nameOverride", "Upper"),
        ("fullnameOverride", "x" * 51),
        ("replicaCount", -1),
        ("replicaCount", "two"),
        ("image.repository", ""),
        ("image.tag", 1.5),
        ("image.digest", "sha256:abc"),
        ("image.pullPolicy", "Sometimes"),
        ("imagePullSecrets", ["pull"]),
        ("config.engine_tls.ca_file", ["ca.crt"]),
        ("config.placement.epsilon", 0),
        ("config.placement.route_seed", -1),
        ("config.placement.route_seed", 2**53),
        ("config.placement.allow_pinning", "no"),
        ("config.placement.index_bytes", (1 << 24) - 1),
        ("config.placement.slow_start_s", -1),
        ("config.fetch.enabled", "yes"),
        ("config.fetch.margin", 1),
        ("config.fetch.max_deadline_ms", 0),
        ("config.limits.max_body_bytes", 0),
        ("config.limits.max_concurrent_requests", 0),
        ("config.limits.connect_timeout_s", 0),
        ("config.limits.first_byte_timeout_s", "10s"),
        ("config.limits.identity_timeout_s", -1),
        ("config.limits.retry_budget", 1.5),
        ("config.telemetry.otlp_endpoint", "collector:4317"),
        ("config.telemetry.log_level", "INFO"),
        ("config.telemetry.observe_usage", "off"),
        ("config.telemetry.receipts", 0),
        ("config.telemetry.parity_sample_every", -1),
        ("config.telemetry.request_log", True),
        ("config.telemetry.hash_prompts", "yes"),
        ("agentToken.key", ""),
        ("agentToken.existingSecret", ["agents"]),
        ("agentTls.existingSecret", ["agents"]),
        ("engineApiKey.key", ""),
        ("extraVolumes", {"name": "tls"}),
        ("extraVolumeMounts", {"name": "tls"}),
        ("extraEnv", {"TZ": "UTC"}),
        ("service.type", "ExternalName"),
        ("service.port", 0),
        ("service.annotations", {"a": 1}),
        ("adminService.port", 65536),
        ("serviceAccount.create", "yes"),
        ("drainSeconds", -1),
        ("terminationGracePeriodSeconds", 1.5),
        ("podAnnotations", {"a": True}),
        ("podLabels", ["a"]),
        ("nodeSelector", {"a": 1}),
        ("tolerations", {}),
        ("affinity", []),
    ],
)
def test_bad_value_is_rejected_by_key(template: Template, path: str, value: Any) -> None:
    with pytest.raises(Rejected) as rejected:
        template(nested(path, value))
    assert f"at '/{path.replace('.', '/')}" in str(rejected.value)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("replicas", "replicas"),
        ("image.name", "name"),
        ("config.listen", "listen"),
        ("config.admin", "admin"),
        ("config.agent_token", "agent_token"),
        ("config.engine_tls.verify", "verify"),
        ("config.placement.seed", "seed"),
        ("config.fetch.deadline_ms", "deadline_ms"),
        ("config.limits.max_body", "max_body"),
        ("config.telemetry.level", "level"),
        ("agentToken.value", "value"),
        ("agentTls.key", "key"),
        ("engineApiKey.value", "value"),
        ("service.nodePort", "nodePort"),
        ("adminService.type", "type"),
        ("serviceAccount.automount", "automount"),
        ("resources.request", "request"),
    ],
)
def test_unknown_key_is_rejected(template: Template, path: str, key: str) -> None:
    with pytest.raises(Rejected, match=f"additional properties '{key}' not allowed"):
        template(nested(path, "x"))


@pytest.mark.parametrize(
    ("replica", "names"),
    [
        ({"id": "replica-0"}, "/config/replicas/0"),
        ({"engine": "http://engine-0:8100"}, "/config/replicas/0"),
        ({**REPLICA, "id": ""}, "/config/replicas/0/id"),
        ({**REPLICA, "engine": "engine-0:8100"}, "/config/replicas/0/engine"),
        ({**REPLICA, "engine": "http://engine-0:8100/v1"}, "/config/replicas/0/engine"),
        ({**REPLICA, "agent": ""}, "/config/replicas/0/agent"),
        ({**REPLICA, "weight": 0}, "/config/replicas/0/weight"),
        ({**REPLICA, "dp_rank": -1}, "/config/replicas/0/dp_rank"),
        ({**REPLICA, "api_key": "x"}, "additional properties 'api_key' not allowed"),
        ({**REPLICA, "engine_tls": {"ca": "x"}}, "additional properties 'ca' not allowed"),
        ({**REPLICA, "url": "x"}, "additional properties 'url' not allowed"),
    ],
)
def test_bad_replica_is_rejected(template: Template, replica: Values, names: str) -> None:
    with pytest.raises(Rejected) as rejected:
        template({"config": {"replicas": [replica]}})
    assert names in str(rejected.value)


def test_duplicate_replica_id_is_rejected(template: Template) -> None:
    with pytest.raises(Rejected, match=r'config\.replicas\[1\]\.id: "replica-0" is used twice'):
        template({"config": {"replicas": [REPLICA, REPLICA]}})


def test_listen_cannot_be_overridden_from_the_environment(template: Template) -> None:
    """The Services and the probes would miss the port."""
    with pytest.raises(Rejected, match="/extraEnv/0/name"):
        template({"extraEnv": [{"name": "PREFIX_GATEWAY_LISTEN__PORT", "value": "9000"}]})

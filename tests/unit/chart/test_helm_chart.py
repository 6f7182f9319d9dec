"""The chart renders what its values say, one case per option.

Everything is `helm lint` and `helm template`: no cluster. After a wanted change of the defaults, refresh the snapshot
with `UPDATE_SNAPSHOTS=1 pytest tests/unit/chart -k snapshot` and read the diff.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_rendering import CHART, ROOT, SNAPSHOT, Render, Template, Values

NAME = {"name": "PREFIX_GATEWAY_LISTEN__NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
"""What the other gateways know a pod by."""


def test_lint_is_clean(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_default_snapshot(template: Template) -> None:
    text = template({})
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


def test_app_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_objects_are_valid_for_kubernetes(render: Render, version: str) -> None:
    everything = render(
        imagePullSecrets=[{"name": "pull"}],
        agentToken={"existingSecret": "agents"},
        engineApiKey={"existingSecret": "engines"},
        agentTls={"existingSecret": "agent-tls"},
        extraVolumes=[{"name": "tls", "secret": {"secretName": "engine-tls"}}],
        extraVolumeMounts=[{"name": "tls", "mountPath": "/etc/engine-tls", "readOnly": True}],
        extraEnv=[{"name": "TZ", "value": "UTC"}],
        service={"annotations": {"a": "b"}},
        podAnnotations={"a": "b"},
        nodeSelector={"pool": "cpu"},
        tolerations=[{"key": "dedicated", "operator": "Exists"}],
        affinity={"podAntiAffinity": {}},
    )
    for rendered in (render(), everything):
        for resource in rendered.objects:
            kubernetes_validate.validate(resource, version, strict=True)


def test_objects_by_default(render: Render) -> None:
    assert render().kinds == ["ConfigMap", "Deployment", "Service", "Service", "ServiceAccount"]


def test_pod_meets_the_restricted_standard(render: Render) -> None:
    rendered = render()
    spec, container = rendered.pod["spec"], rendered.container
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert rendered.find("ServiceAccount")["automountServiceAccountToken"] is False
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_no_service_links(render: Render) -> None:
    """They would set PREFIX_GATEWAY_PORT, which the gateway must refuse as an unknown setting."""
    assert render().pod["spec"]["enableServiceLinks"] is False


def test_probes(render: Render) -> None:
    container = render().container
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}


def test_services_select_the_pods(render: Render) -> None:
    rendered = render()
    labels = rendered.pod["metadata"]["labels"]
    for name, port in (("prefix-gateway", "http"), ("prefix-gateway-admin", "admin")):
        spec = rendered.find("Service", name)["spec"]
        assert spec["selector"].items() <= labels.items()
        assert [p["targetPort"] for p in spec["ports"]] == [port]
    assert rendered.find("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_name_override(render: Render) -> None:
    rendered = render(nameOverride="router")
    assert rendered.find("Deployment", "prefix-gateway-router")["metadata"]["labels"]["app.kubernetes.io/name"] == (
        "router"
    )


def test_fullname_override(render: Render) -> None:
    rendered = render(fullnameOverride="edge")
    assert {o["metadata"]["name"] for o in rendered.objects} == {"edge", "edge-admin"}


@pytest.mark.parametrize("count", [0, 3])
def test_replica_count(render: Render, count: int) -> None:
    assert render(replicaCount=count).find("Deployment")["spec"]["replicas"] == count


DIGEST = "sha256:" + "0f" * 32


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "prefix-gateway:0.1.0"),
        ({"repository": "mirror:5000/pg", "tag": "1.2.3"}, "mirror:5000/pg:1.2.3"),
        ({"digest": DIGEST, "tag": "1.2.3"}, f"prefix-gateway@{DIGEST}"),
    ],
)
def test_image(render: Render, image: Values, expected: str) -> None:
    assert render(image=image).container["image"] == expected


def test_image_pull(render: Render) -> None:
    rendered = render(image={"pullPolicy": "Always"}, imagePullSecrets=[{"name": "pull"}])
    assert rendered.container["imagePullPolicy"] == "Always"
    assert rendered.pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_agent_token_is_a_reference(render: Render) -> None:
    assert render().container["env"] == [NAME]
    (_, variable) = render(agentToken={"existingSecret": "agents", "key": "t"}).container["env"]
    assert variable == {
        "name": "PREFIX_GATEWAY_AGENT_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "agents", "key": "t"}},
    }


def test_engine_api_key_is_a_reference(render: Render) -> None:
    (_, variable) = render(engineApiKey={"existingSecret": "engines"}).container["env"]
    assert variable == {
        "name": "PREFIX_GATEWAY_ENGINE_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "engines", "key": "api-key"}},
    }


def test_extra_volumes(render: Render) -> None:
    volume = {"name": "tls", "secret": {"secretName": "engine-tls"}}
    mount = {"name": "tls", "mountPath": "/etc/engine-tls", "readOnly": True}
    rendered = render(extraVolumes=[volume], extraVolumeMounts=[mount])
    assert volume in rendered.pod["spec"]["volumes"]
    assert mount in rendered.container["volumeMounts"]


def test_extra_env(render: Render) -> None:
    env = [{"name": "PREFIX_GATEWAY_LIMITS__RETRY_BUDGET", "value": "0"}]
    assert render(extraEnv=env).container["env"] == [NAME, *env]


def test_service(render: Render) -> None:
    service = render(service={"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}}).find("Service")
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("LoadBalancer", 80)
    assert service["metadata"]["annotations"] == {"a": "b"}


def test_admin_service_stays_inside(render: Render) -> None:
    rendered = render(service={"type": "LoadBalancer"}, adminService={"port": 9001, "annotations": {"a": "b"}})
    service = rendered.find("Service", "prefix-gateway-admin")
    assert (service["spec"]["type"], service["spec"]["ports"][0]["port"]) == ("ClusterIP", 9001)
    assert service["metadata"]["annotations"] == {"a": "b"}


def test_service_account(render: Render) -> None:
    named = render(serviceAccount={"name": "edge", "annotations": {"a": "b"}})
    assert named.find("ServiceAccount", "edge")["metadata"]["annotations"] == {"a": "b"}
    assert named.pod["spec"]["serviceAccountName"] == "edge"


@pytest.mark.parametrize(("name", "expected"), [("", "default"), ("existing", "existing")])
def test_service_account_not_created(render: Render, name: str, expected: str) -> None:
    rendered = render(serviceAccount={"create": False, "name": name})
    assert "ServiceAccount" not in rendered.kinds
    assert rendered.pod["spec"]["serviceAccountName"] == expected


def test_resources(render: Render) -> None:
    resources = render(resources={"requests": {"cpu": 2}, "limits": None}).container["resources"]
    assert resources == {"requests": {"cpu": 2, "memory": "512Mi"}}


def test_drain(render: Render) -> None:
    command = render(drainSeconds=12).container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python", "-c", "import time; time.sleep(12)"]
    assert "lifecycle" not in render(drainSeconds=0).container


@pytest.mark.parametrize("seconds", [0, 30])
def test_termination_grace_period(render: Render, seconds: int) -> None:
    rendered = render(terminationGracePeriodSeconds=seconds, drainSeconds=0)
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] == seconds


def test_pod_metadata(render: Render) -> None:
    metadata = render(podAnnotations={"a": "b"}, podLabels={"team": "serving"}).pod["metadata"]
    assert metadata["annotations"]["a"] == "b"
    assert metadata["labels"]["team"] == "serving"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nodeSelector", {"pool": "cpu"}),
        ("tolerations", [{"key": "dedicated", "operator": "Exists"}]),
        ("affinity", {"podAntiAffinity": {}}),
    ],
)
def test_scheduling(render: Render, key: str, value: Any) -> None:
    assert key not in render().pod["spec"]
    assert render(**{key: value}).pod["spec"][key] == value

"""What the chart's tests share: the objects of one `helm template`, by kind and name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "prefix-gateway"
SNAPSHOT = ROOT / "tests" / "snapshots" / "helm_default.yaml"

Values = dict[str, Any]


class Rejected(Exception):
    """helm refused to render; the message is its stderr."""


@dataclass(frozen=True)
class Rendered:
    """The objects of one `helm template`, by kind and name."""

    objects: list[dict[str, Any]]

    def find(self, kind: str, name: str = "prefix-gateway") -> dict[str, Any]:
        (found,) = [o for o in self.objects if o["kind"] == kind and o["metadata"]["name"] == name]
        return found

    @property
    def kinds(self) -> list[str]:
        return sorted(o["kind"] for o in self.objects)

    @property
    def pod(self) -> dict[str, Any]:
        return dict(self.find("Deployment")["spec"]["template"])

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["spec"]["containers"]
        return dict(container)

    @property
    def checksum(self) -> str:
        return str(self.pod["metadata"]["annotations"]["checksum/config"])

    @property
    def config(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.find("ConfigMap")["data"]["config.yaml"]))


Template = Callable[[Values], str]
"""The text that `helm template` prints with these values on top of the defaults; raises Rejected."""

Render = Callable[..., Rendered]
"""The same, parsed; the values are keyword arguments."""

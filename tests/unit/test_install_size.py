"""An installation without extras is small and loads nothing heavy: `scripts/install_size.py`, run as it is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_size", ROOT / "scripts" / "install_size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_installation_imports_the_gateway_without_its_extras(script: ModuleType) -> None:
    """Here the heavy packages are installed, and none of them is loaded."""
    script.check_imports(Path(sys.executable), ROOT)


def test_a_gateway_that_loads_something_heavy_is_found_out(script: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "gateway"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "careless.py").write_text("import zmq\n")
    with pytest.raises(script.CheckFailed, match="importing gateway loads zmq"):
        script.check_imports(Path(sys.executable), tmp_path)


def test_a_fresh_installation_is_below_its_limit(script: ModuleType) -> None:
    reason = index_missing()
    if reason:
        pytest.skip(f"pip reaches no package index: {reason}")
    found = script.measure(ROOT, script.LIMIT_MB)
    assert script.LIMIT_MB == 200
    assert {"gateway", "kvstore", "fastapi", "numpy", "tokenizers"} <= set(found)
    assert not {"torch", "zmq", "transformers"} & set(found)
    assert 10e6 < found.total() < 200e6


def index_missing() -> str:
    """Why pip finds no versions of a small package, "" when it can."""
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "idna", "--retries", "0", "--timeout", "15"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return "" if probe.returncode == 0 else (probe.stderr.strip().splitlines() or ["no answer"])[-1]

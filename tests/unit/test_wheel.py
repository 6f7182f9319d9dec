"""The project's wheel without its dependencies: what a vLLM environment gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from wheel_support import PACKAGES, installed

REFUSED = (
    "aiohttp",
    "fastapi",
    "gateway",
    "httpx",
    "jinja2",
    "opentelemetry",
    "prometheus_client",
    "starlette",
    "tokenizers",
    "transformers",
    "uvicorn",
    "xxhash",
    "yaml",
    "zmq",
)
"""What the connector has to do without, besides vLLM itself, which is not here."""

CODE = """
import importlib, json, sys
target, refused, names = sys.argv[1], set(json.loads(sys.argv[2])), json.loads(sys.argv[3])

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"refused: {name}")

sys.meta_path.insert(0, Refusal())
sys.path.insert(0, target)
for name in names:
    assert importlib.import_module(name).__file__.startswith(target), name
try:
    importlib.import_module("replica_agent.engines.vllm").PrefixGatewayConnector
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_wheel_without_dependencies_has_the_connector(tmp_path: Path) -> None:
    target = installed(tmp_path)
    assert {path.name for path in target.iterdir() if path.is_dir() and path.suffix != ".dist-info"} >= set(PACKAGES)
    seam = ("__init__", "connector", "compat", "stats")
    modules = (target / "replica_agent/engines/vllm").glob("*.py")
    names = sorted(f"replica_agent.engines.vllm.{path.stem}" for path in modules if path.stem not in seam)
    assert len(names) > 8
    command = [sys.executable, "-I", "-c", CODE, str(target), json.dumps([*REFUSED]), json.dumps(names)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "No module named 'vllm'"), done.stderr

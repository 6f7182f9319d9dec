"""OpenAI's Node SDK against the gateway. `node/chat.mjs` makes the calls, this file judges what it saw."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

MODEL = "tiny"
SOURCE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The SDK of the lock file, installed outside the repository and kept under the lock file's digest."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefix-gateway" / "node"
    kept = cache / hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()[:16]
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(SOURCE / name, folder)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
            assert done.returncode == 0, done.stderr
            # Whole or not at all; a run beside this one may have been first.
            if not kept.is_dir():
                (Path(folder) / "node_modules").rename(kept)
    return kept


@pytest.fixture(scope="module")
def seen(gateway_url: str, node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(SOURCE / "chat.mjs", folder)
    (folder / "node_modules").symlink_to(node_modules)
    command = ["node", "chat.mjs", f"{gateway_url}/v1", MODEL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_chat(seen: dict[str, Any]) -> None:
    assert seen["chat"]
    assert seen["finishReason"] in ("stop", "length")
    assert seen["requestID"]
    assert seen["replica"]


def test_stream_adds_up_to_the_answer(seen: dict[str, Any]) -> None:
    assert seen["streamed"] == seen["chat"]
    assert seen["usage"]["completion_tokens"] > 0


def test_models(seen: dict[str, Any]) -> None:
    assert MODEL in seen["models"]


def test_unknown_model(seen: dict[str, Any]) -> None:
    error = seen["unknownModel"]
    assert (error["kind"], error["status"], error["code"]) == ("NotFoundError", 404, "model_not_found")
    assert error["requestID"]


def test_bad_body(seen: dict[str, Any]) -> None:
    error = seen["badBody"]
    assert (error["kind"], error["status"]) == ("BadRequestError", 400)
    assert error["code"]
    assert error["requestID"]

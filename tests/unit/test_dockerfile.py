"""The image is not built here (that needs an engine); what it would be built from is checked instead."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def instructions() -> Iterator[tuple[str, str]]:
    """(INSTRUCTION, arguments) of the Dockerfile, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name.upper(), rest.strip()


def copied() -> list[str]:
    """What is copied from the build context."""
    found: list[str] = []
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            found += shlex.split(rest)[:-1]
    return found


def last(instruction: str) -> str:
    return [rest for name, rest in instructions() if name == instruction][-1]


def sent(path: str) -> bool:
    """Whether .dockerignore lets `path` into the build context: the last matching pattern decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch(path, pattern.removeprefix("!")):
            kept = pattern.startswith("!")
    return kept


def test_every_copied_file_exists_and_is_sent() -> None:
    assert copied()
    for path in copied():
        assert (ROOT / path).exists(), path
        assert sent(path), f"{path} is excluded by .dockerignore"


@pytest.mark.parametrize("path", [".git", ".venv", "tests", "helm", "benchmarks", "replica_agent"])
def test_nothing_else_is_sent(path: str) -> None:
    assert not sent(path)


def test_runs_as_the_user_and_command_of_the_chart() -> None:
    deployment = (ROOT / "tests" / "snapshots" / "helm_default.yaml").read_text()
    (pod,) = [o["spec"]["template"]["spec"] for o in yaml.safe_load_all(deployment) if o["kind"] == "Deployment"]
    context, (container,) = pod["securityContext"], pod["containers"]
    assert last("USER") == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert json.loads(last("ENTRYPOINT")) == container["command"]
    assert json.loads(last("CMD")) == container["args"]
    assert last("EXPOSE").split() == [str(port["containerPort"]) for port in container["ports"]]


def test_installs_from_what_is_copied(tmp_path: Path) -> None:
    """The tree that the build sees is a whole project, and holds the gateway alone."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for path in copied():
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, source / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, source / path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (site / "bin" / "prefix-gateway").is_file()
    assert (site / "kvstore" / "py.typed").is_file()
    assert (site / "gateway" / "demo" / "documents" / "tram-timetable.md").is_file()
    assert not (site / "replica_agent").exists()

"""The project's wheel, as `pip install --no-deps .` makes it beside vLLM; nothing is looked up elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "gateway", "replica_agent")


def installed(directory: Path, python: str = sys.executable) -> Path:
    """Builds the wheel and has `python`'s pip install it, alone, into a folder, which is returned."""
    source, wheels, target = (directory / name for name in ("source", "wheels", "target"))
    # Building leaves files where it builds.
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / file, source)
    offline = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    _pip(sys.executable, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    _pip(python, "install", *offline, "--target", str(target), str(wheel))
    return target


def _pip(python: str, *arguments: str) -> None:
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr

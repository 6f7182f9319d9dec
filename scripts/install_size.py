"""Report how large an installation of the gateway is, and check what importing it loads.

    python scripts/install_size.py [--limit-mb 200] [--source DIR]

The project is installed without extras into an empty virtual environment that holds no pip or setuptools, so that what
lies in its site-packages is the gateway and its dependencies, byte code included. Then every module of `gateway` is
imported twice: there, where a dependency that was not declared is missing, and by the interpreter that runs this
script, where the heavy packages may be at hand and must still not be loaded. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "kvstore", "gateway", "replica_agent")
"""What a build needs. It runs on a copy, since setuptools leaves build folders in the tree it builds from."""

FORBIDDEN = ("torch", "zmq", "nixl", "transformers", "replica_agent")
"""What the gateway must not load: its extras, and the package that needs them."""

LIMIT_MB = 200
"""MB are 10**6 bytes."""

_IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path[:0] = [folder for folder in sys.argv[1:2] if folder]
def failed(name): raise
import gateway
for module in pkgutil.walk_packages(gateway.__path__, "gateway.", onerror=failed):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
loaded = [name for name in sys.argv[2:] if name in sys.modules]
if loaded:
    sys.exit("importing gateway loads " + ", ".join(loaded))
"""


class CheckFailed(Exception):
    """The message says which check, and by how much."""


def install(source: Path, folder: Path) -> Path:
    """Installs the project at `source` into a new environment under `folder`; returns its interpreter."""
    tree, environment = folder / "source", folder / "environment"
    tree.mkdir()
    for part in PARTS:
        path = source / part
        if path.is_dir():
            shutil.copytree(path, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, tree / part)
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise CheckFailed(f"pip install failed:\n{done.stderr}")
    return python


def sizes(python: Path) -> Counter[str]:
    """Bytes by top-level entry of the environment's site-packages."""
    (site,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    total: Counter[str] = Counter()
    for path in site.rglob("*"):
        if path.is_file() and not path.is_symlink():
            total[path.relative_to(site).parts[0]] += path.stat().st_size
    return total


def check_imports(python: Path, path: Path | None = None) -> None:
    """Imports every module of `gateway` in a new process, from `path` if given. Raises CheckFailed."""
    command = [str(python), "-I", "-c", _IMPORT_ALL, str(path or ""), *FORBIDDEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise CheckFailed(f"{python}: {done.stderr.strip()}")


def measure(source: Path, limit_mb: float) -> Counter[str]:
    """Installs, checks and measures; returns bytes by top-level entry. Raises CheckFailed."""
    with tempfile.TemporaryDirectory(prefix="install-size-") as folder:
        python = install(source, Path(folder))
        check_imports(python)
        check_imports(Path(sys.executable), source)
        found = sizes(python)
    if found.total() > limit_mb * 1e6:
        biggest = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in found.most_common(5))
        raise CheckFailed(f"{found.total() / 1e6:.1f} MB installed, limit {limit_mb:g} MB; biggest: {biggest}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Size of an installation of the gateway without extras.")
    parser.add_argument("--limit-mb", type=float, default=LIMIT_MB)
    parser.add_argument("--source", type=Path, default=ROOT)
    options = parser.parse_args()
    try:
        found = measure(options.source, options.limit_mb)
    except CheckFailed as error:
        print(f"install_size: {error}", file=sys.stderr)
        return 1
    print(f"{found.total() / 1e6:.1f} MB installed (limit {options.limit_mb:g} MB); the biggest:")
    for name, size in found.most_common(8):
        print(f"  {size / 1e6:6.1f} MB  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

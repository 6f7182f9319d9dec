"""scripts/get_helm.py hands out the recorded binary or none."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest


def test_runs(helm: str) -> None:
    done = subprocess.run([helm, "version", "--short"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("v3.")


def test_damaged_cache_is_replaced(
    helm: str, get_helm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HELM", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = tmp_path / "prefix-gateway" / "bin" / "helm"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"half a download")
    assert get_helm.helm_path() == cached
    assert hashlib.sha256(cached.read_bytes()).hexdigest() == get_helm.SHA256
    assert [path.name for path in cached.parent.iterdir()] == ["helm"]


def test_other_binary_is_refused(get_helm: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(get_helm.HelmUnavailable, match="expected"):
        get_helm._install(b"another helm", tmp_path / "helm")
    assert list(tmp_path.iterdir()) == []


def test_override(get_helm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "helm"
    monkeypatch.setenv("HELM", str(own))
    with pytest.raises(get_helm.HelmUnavailable, match="not an executable"):
        get_helm.helm_path()
    own.touch(mode=0o755)
    assert get_helm.helm_path() == own

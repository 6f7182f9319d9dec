"""Weights and operations of known models, against published counts and against adding it all up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_models import DEEPSEEK_V3, GEMMA_3_27B, GPT_OSS_120B, LLAMA_3_8B, MODELS, dense

from kvstore.errors import GeometryError
from kvstore.flops import ModelShape, prefill_flops
from kvstore.models import KNOWN_MODELS

H100_FLOPS = 0.4 * 989e12
"""Operations per second at 40 % of the bf16 peak of one H100."""


@pytest.mark.parametrize("name", MODELS)
def test_known_models(name: str) -> None:
    config, _, _, weights, active = MODELS[name]
    shape = ModelShape.from_config(config)
    assert shape.active_weights / 1e9 == pytest.approx(active, rel=2e-3, abs=5e-3)
    assert shape.weights / 1e9 == pytest.approx(weights, rel=2e-3, abs=5e-2)


def test_models_known_by_name_are_those() -> None:
    for name, model in (("llama-3-8b", "Llama-3.1-8B"), ("llama-3-70b", "Llama-3.1-70B")):
        named, given_ = ModelShape.from_config(KNOWN_MODELS[name]), ModelShape.from_config(MODELS[model][0])
        assert (named.active_weights, named.weights, named.max_tokens) == (
            *(given_.active_weights, given_.weights),
            131_072,
        )


def test_what_a_prefill_of_llama_3_8b_takes() -> None:
    """2 x 6.98e9 a token, 2 x 32 layers x 32 heads x 256 a position attended to, and one output head."""
    shape = ModelShape.from_config(LLAMA_3_8B)
    assert prefill_flops(shape, 0) == 0
    assert shape.active_weights == 6_979_321_856
    expected = 2 * 6_979_321_856 * 100 + 2 * 32 * 32 * 256 * (100 * 500 + 5_050) + 2 * 4096 * 128_256
    assert prefill_flops(shape, 100, context=500) == expected


@pytest.mark.parametrize(
    ("config", "gpus", "at_32k", "at_128k"),
    [(LLAMA_3_8B, 1, 79, 209), (GPT_OSS_120B, 1, 47, 121), (GEMMA_3_27B, 1, 143, 184), (DEEPSEEK_V3, 8, 74, 230)],
    ids=["llama", "gpt-oss", "gemma", "deepseek"],
)
def test_microseconds_of_one_more_token(config: dict[str, Any], gpus: int, at_32k: int, at_128k: int) -> None:
    shape = ModelShape.from_config(config)
    for context, expected in ((32_768, at_32k), (131_072, at_128k)):
        if shape.expand_dims:
            # Rebuilding the context is paid once a step, not once a token.
            step = prefill_flops(shape, 2, context) - prefill_flops(shape, 1, context)
        else:
            step = prefill_flops(shape, 1, context) - shape.head_flops
        assert step / (gpus * H100_FLOPS) * 1e6 == pytest.approx(expected, rel=0.02)


@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.sampled_from((0, 1, 7, 50)), min_size=3, max_size=3))
def test_attention_adds_up_position_by_position(tokens: int, context: int, windows: list[int]) -> None:
    config = dense(3, 4, 2, 8, 16, 10) | {"head_dim": 2}
    shape = msgspec.structs.replace(ModelShape.from_config(config), windows=tuple(windows))
    pairs = sum(min(context + at, window or context + at) for window in windows for at in range(1, tokens + 1))
    head = shape.head_flops if tokens else 0
    assert prefill_flops(shape, tokens, context) == 2 * (tokens * shape.active_weights + 4 * 4 * pairs) + head


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_attention_is_what_each_token_before_adds(tokens: int, context: int) -> None:
    """Of a model without windows it gives the operations of any prefill but the output head's."""
    shape = ModelShape.from_config(LLAMA_3_8B)
    expected = 2 * shape.active_weights * tokens * (1 + shape.attention * (context + (tokens + 1) / 2))
    assert prefill_flops(shape, tokens, context) - shape.head_flops == pytest.approx(expected)


def test_attention_of_known_models() -> None:
    """2 x 32 layers x 32 heads x 256 / 2 / 6.98e9; five of six layers of Gemma 3 look back over a window only."""
    assert ModelShape.from_config(LLAMA_3_8B).attention == pytest.approx(3.756e-5, rel=1e-3)
    gemma = ModelShape.from_config(GEMMA_3_27B)
    assert gemma.full_layers == 10
    assert gemma.pair_flops == 2 * gemma.heads * gemma.score_dims * 10


def test_a_latent_context_is_rebuilt() -> None:
    shape = ModelShape.from_config(DEEPSEEK_V3)
    plain = prefill_flops(
        ModelShape(**{f: getattr(shape, f) for f in shape.__struct_fields__} | {"expand_dims": 0}), 8, 100
    )
    assert prefill_flops(shape, 8, 100) - plain == 2 * 61 * 512 * 128 * (128 + 128) * 100


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"num_local_experts": 8}, "num_experts_per_tok: missing"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": "1"}, "first_k_dense_replace: "),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers: "),
        ({"index_topk": 2048}, "index_topk: "),
    ],
)
def test_an_error_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(GeometryError, match=f"^{named}"):
        ModelShape.from_config(LLAMA_3_8B | change)


def test_layers_without_experts_are_dense() -> None:
    """Of 6 layers with experts in every other one, one more is excepted: 2 remain."""
    config = dense(6, 4, 2, 8, 16, 10) | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    shape = ModelShape.from_config(config | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    attention, expert, dense_one = 6 * 8 * (4 + 2) * 4, 3 * 8 * 4, 3 * 8 * 16
    assert shape.active_weights == attention + 4 * dense_one + 2 * (8 * 5 + 2 * expert)
    assert shape.layer_weights == attention + 4 * dense_one + 2 * (8 * 5 + 5 * expert)


def test_a_model_without_a_gate_has_two_matrices() -> None:
    gated = ModelShape.from_config(dense(2, 4, 2, 8, 16, 10))
    plain = ModelShape.from_config(dense(2, 4, 2, 8, 16, 10, model_type="starcoder2"))
    assert gated.active_weights - plain.active_weights == 2 * 8 * 16

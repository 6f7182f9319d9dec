"""KV bytes of known models, how ranks split them, and errors that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_models import DEEPSEEK_V3, GEMMA_3_27B, GPT_OSS_120B, LLAMA_3_8B, LLAMA_3_70B, MODELS, dense

from kvstore.errors import GeometryError
from kvstore.geometry import DTYPE_BYTES, KvGeometry, stage_layers

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "dtype": "bfloat16",
}


def test_smollm2() -> None:
    geometry = KvGeometry.from_config(SMOLLM2)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (30, 3, 64)
    assert geometry.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert geometry.block_bytes(16) == 368_640


@pytest.mark.parametrize("name", MODELS)
def test_known_models(name: str) -> None:
    config, bytes_per_token, growth, *_ = MODELS[name]
    geometry = KvGeometry.from_config(config)
    assert (geometry.bytes_per_token, geometry.growth_per_token) == (bytes_per_token, growth)
    assert KvGeometry.from_config(config, dtype="fp8").bytes_per_token == bytes_per_token // 2
    assert msgspec.json.decode(msgspec.json.encode(geometry), type=KvGeometry) == geometry


def test_defaults() -> None:
    """Without kv heads every head has its own; without a dtype it is bfloat16; the newer field wins."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert KvGeometry.from_config(config) == KvGeometry(layers=2, kv_heads=4, head_dim=16, dtype="bfloat16")
    both = config | {"dtype": "float32", "torch_dtype": "float16"}
    assert KvGeometry.from_config(both).dtype == "float32"


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_every_dtype_counts(dtype: str) -> None:
    assert KvGeometry.from_config(SMOLLM2, dtype).bytes_per_token == 11_520 * DTYPE_BYTES[dtype]


def test_a_plain_geometry_is_written_as_ever() -> None:
    """What older readers do not know is on the wire only where it differs from what they assume."""
    geometry = KvGeometry(layers=2, kv_heads=4, head_dim=16, dtype="bfloat16")
    assert msgspec.json.encode(geometry) == b'{"layers":2,"kv_heads":4,"head_dim":16,"dtype":"bfloat16"}'


def test_multi_query_attention() -> None:
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert KvGeometry.from_config(falcon).kv_heads == 1
    newer = falcon | {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 128}
    assert KvGeometry.from_config(newer).kv_heads == 8


def test_values_may_have_other_dims_than_keys() -> None:
    geometry = KvGeometry.from_config(SMOLLM2 | {"v_head_dim": 32})
    assert geometry.bytes_per_token == 30 * 3 * (64 + 32) * 2
    assert KvGeometry.from_config(SMOLLM2 | {"v_head_dim": 64}) == KvGeometry.from_config(SMOLLM2)


def test_a_latent_is_one_for_all_heads_and_on_every_rank() -> None:
    geometry = KvGeometry.from_config(DEEPSEEK_V3)
    assert (geometry.latent, geometry.kv_heads, geometry.head_dim) == (True, 1, 576)
    assert geometry.bytes_per_token == 61 * (512 + 64) * 2
    assert geometry.rank_bytes_per_token(tp=8) == geometry.bytes_per_token
    assert geometry.replication(8) == 8


def test_a_windowed_layer_keeps_its_window() -> None:
    geometry = KvGeometry.from_config(GPT_OSS_120B)
    assert sum(window > 0 for window in geometry.windows) == 18
    for tokens in (1, 127, 128, 129, 10_000):
        assert geometry.sequence_bytes(tokens) == 36_864 * tokens + 18 * 2_048 * min(tokens, 128)
    assert KvGeometry.from_config(LLAMA_3_8B).sequence_bytes(1_000) == 131_072_000


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 4096}, (4096, 4096, 4096, 4096)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 0}, ()),
        ({"sliding_window": 64, "use_sliding_window": False}, ()),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 64)),
        ({"sliding_window": 64, "use_sliding_window": True}, ()),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, (64, 0, 64, 0)),
        ({"sliding_window": 64, "sliding_window_pattern": 1}, ()),
        ({"sliding_window": 64, "layer_types": ["full_attention", *["sliding_attention"] * 3]}, (0, 64, 64, 64)),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 4}, ()),
        ({"model_type": "mistral"}, (4096, 4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "gemma2"}, (4096, 0, 4096, 0)),
        ({"model_type": "cohere2", "sliding_window": 64}, (64, 64, 64, 0)),
    ],
)
def test_which_layers_are_windowed(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert KvGeometry.from_config(dense(4, 8, 2, 64, 128, 1000) | change).windows == windows


def test_a_nested_config_inherits_what_it_leaves_out() -> None:
    for inner, dtype in ((SMOLLM2, "bfloat16"), (SMOLLM2 | {"dtype": None}, "float16"), (_without(SMOLLM2), "float16")):
        assert KvGeometry.from_config({"dtype": "float16", "text_config": inner}).dtype == dtype
    assert KvGeometry.from_config(GEMMA_3_27B).layers == 62


def _without(config: dict[str, Any], field: str = "dtype") -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != field}


@pytest.mark.parametrize(
    ("tp", "pp", "heads", "copies", "kib"),
    [
        (1, 1, 8, 1, 320),
        (8, 1, 1, 1, 40),
        (8, 2, 1, 1, 20),
        (16, 1, 1, 2, 40),
        (3, 1, 3, 1.125, 120),
        (1, 3, 8, 1, 108),
    ],
)
def test_ranks_split_heads_and_layers(tp: int, pp: int, heads: int, copies: float, kib: float) -> None:
    """TP 16 with 8 heads keeps each twice; 80 layers over 3 stages make 27 in the largest."""
    geometry = KvGeometry.from_config(LLAMA_3_70B)
    assert (geometry.heads_per_rank(tp), geometry.replication(tp)) == (heads, copies)
    assert geometry.rank_bytes_per_token(tp, pp) == kib * 1024


def test_a_stage_keeps_the_windows_of_its_own_layers() -> None:
    geometry = KvGeometry(layers=4, kv_heads=2, head_dim=8, dtype="fp8", windows=(10, 10, 0, 10))
    first, second = stage_layers(4, 2)
    assert geometry.rank_sequence_bytes(100, 2, first) == 16 * (10 + 10)
    assert geometry.rank_sequence_bytes(100, 2, second) == 16 * (100 + 10)


def test_layers_that_are_left_over_go_to_the_last_stages_but_one() -> None:
    assert [len(stage) for stage in stage_layers(10, 4)] == [2, 3, 3, 2]
    assert [len(stage) for stage in stage_layers(11, 4)] == [3, 3, 3, 2]
    assert [len(stage) for stage in stage_layers(3, 2)] == [2, 1]


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_cover_all_layers_evenly(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(GeometryError, match=f"^pp: {pp} stages cannot share {layers} layers"):
            stage_layers(layers, pp)
        return
    stages = stage_layers(layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == pp and max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"num_attention_heads": None}, "num_attention_heads: missing"),
        ({"head_dim": None, "hidden_size": None}, "hidden_size: missing"),
        ({"head_dim": None, "hidden_size": 4}, "head_dim: expected a positive integer, got 0"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers: expected a positive integer, got '30'"),
        ({"num_hidden_layers": 10**20}, "num_hidden_layers: 100000000000000000000 is more than any model has"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected a positive integer, got 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads: expected a positive integer, got True"),
        ({"head_dim": -64}, "head_dim: expected a positive integer, got -64"),
        ({"v_head_dim": -64}, "v_head_dim: expected a positive integer, got -64"),
        ({"dtype": "int4"}, "dtype: 'int4' is not one of float32"),
        ({"dtype": ["bfloat16"]}, "dtype: "),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim: missing"),
        ({"sliding_window": "64"}, "sliding_window: expected a positive integer, got '64'"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern: "),
        ({"layer_types": ["full_attention"] * 29}, "layer_types: expected a list with one kind for each of 30 layers"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list"),
        ({"layer_types": [["full_attention"]] * 30}, "layer_types: layers of kind"),
        ({"layer_types": ["chunked_attention"] * 30}, "layer_types: layers of kind 'chunked_attention' cannot"),
        ({"layer_types": ["linear_attention"] * 30}, "layer_types: layers of kind 'linear_attention' cannot"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: chunked attention"),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios: "),
        ({"index_topk": 2048}, "index_topk: "),
        ({"mamba_d_state": 128}, "mamba_d_state: a hybrid"),
        ({"full_attention_interval": 4}, "full_attention_interval: a hybrid"),
        ({"attn_type_list": [1, 0, 1]}, "attn_type_list: a hybrid"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers: "),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: "),
    ],
)
def test_an_error_names_the_field(change: dict[str, Any], named: str) -> None:
    for config in (SMOLLM2 | change, {"text_config": SMOLLM2 | change}):
        with pytest.raises(GeometryError, match=f"^{named}"):
            KvGeometry.from_config(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "int4"}, "dtype: "),
        ({"layers": 0}, "layers: "),
        ({"head_dim": -1}, "head_dim: "),
        ({"v_head_dim": -1}, "v_head_dim: "),
        ({"v_head_dim": 0, "kv_heads": 2}, "kv_heads: latent attention keeps one"),
        ({"windows": [0, 0]}, "windows: expected one for each of 1 layers"),
        ({"windows": [-1]}, "windows: "),
    ],
)
def test_a_geometry_from_the_wire_is_checked(change: dict[str, Any], named: str) -> None:
    wire = msgspec.json.encode({"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float16"} | change)
    with pytest.raises(GeometryError, match=f"^{named}"):
        msgspec.json.decode(wire, type=KvGeometry)

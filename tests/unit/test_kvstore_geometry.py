"""KV bytes of known models, and errors that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.errors import GeometryError
from kvstore.geometry import DTYPE_BYTES, KvGeometry

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "dtype": "bfloat16",
}
LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_smollm2() -> None:
    geometry = KvGeometry.from_config(SMOLLM2)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (30, 3, 64)
    assert geometry.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert geometry.block_bytes(16) == 368_640


def test_llama_3_8b() -> None:
    geometry = KvGeometry.from_config(LLAMA_3_8B)
    assert geometry.head_dim == 128
    assert geometry.bytes_per_token == 131_072
    assert KvGeometry.from_config(LLAMA_3_8B, dtype="fp8").bytes_per_token == 65_536


def test_defaults() -> None:
    """Without kv heads every head has its own; without a dtype it is bfloat16; the newer field wins."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert KvGeometry.from_config(config) == KvGeometry(layers=2, kv_heads=4, head_dim=16, dtype="bfloat16")
    both = config | {"dtype": "float32", "torch_dtype": "float16"}
    assert KvGeometry.from_config(both).dtype == "float32"


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
def test_every_dtype_counts(dtype: str) -> None:
    assert KvGeometry.from_config(SMOLLM2, dtype).bytes_per_token == 11_520 * DTYPE_BYTES[dtype]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"num_attention_heads": None}, "num_attention_heads: missing"),
        ({"head_dim": None, "hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers: expected a positive integer, got '30'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected a positive integer, got 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads: expected a positive integer, got True"),
        ({"head_dim": -64}, "head_dim: expected a positive integer, got -64"),
        ({"dtype": "int4"}, "dtype: 'int4' is not one of float32"),
        ({"dtype": ["bfloat16"]}, "dtype: "),
        ({"kv_lora_rank": 512}, "kv_lora_rank: latent attention"),
    ],
)
def test_an_error_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(GeometryError, match=f"^{named}"):
        KvGeometry.from_config(SMOLLM2 | change)


@pytest.mark.parametrize(
    ("change", "named"), [({"dtype": "int4"}, "dtype: "), ({"layers": 0}, "layers: "), ({"head_dim": -1}, "head_dim: ")]
)
def test_a_geometry_from_the_wire_is_checked(change: dict[str, Any], named: str) -> None:
    wire = msgspec.json.encode({"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float16"} | change)
    with pytest.raises(GeometryError, match=f"^{named}"):
        msgspec.json.decode(wire, type=KvGeometry)

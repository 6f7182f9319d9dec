from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.geometry import KvGeometry
from replica_agent.errors import ModelFilesUnavailable
from replica_agent.model_files import MAX_BYTES, load_attention, load_geometry, load_model_files


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_template_file_wins_and_tokens_come_in_both_shapes(tmp_path: Path) -> None:
    files = load_model_files(
        write(
            tmp_path,
            tokenizer__json="{}",
            chat_template__jinja="from file",
            tokenizer_config__json={
                "chat_template": "from config",
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "pad_token": None,
                "add_bos_token": True,
            },
            special_tokens_map__json={"eos_token": "<old>", "unk_token": {"content": "<unk>"}, "additional": ["x"]},
        ),
        "m",
    )
    assert (files.model, files.tokenizer_json, files.chat_template) == ("m", b"{}", "from file")
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files.add_bos_token is True


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("t", "t"),
        ([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "tool_use", "template": "a"}], None),
        (None, None),
    ],
)
def test_template_of_the_config(tmp_path: Path, template: object, expected: str | None) -> None:
    write(tmp_path, tokenizer__json="{}", tokenizer_config__json={"chat_template": template})
    assert load_model_files(tmp_path, "m").chat_template == expected


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    write(tmp_path, tokenizer__json="{}")
    first = load_model_files(tmp_path, "m").digest
    assert load_model_files(tmp_path, "m").digest == first
    write(tmp_path, chat_template__jinja="x")
    assert load_model_files(tmp_path, "m").digest != first


def test_what_cannot_be_handed_out_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesUnavailable) as caught:
        load_model_files(tmp_path, "m")
    assert caught.value.code == "no_tokenizer"
    write(tmp_path, tokenizer__json="{}", tokenizer_config__json="[")
    with pytest.raises(ModelFilesUnavailable) as caught:
        load_model_files(tmp_path, "m")
    assert caught.value.code == "malformed"
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ModelFilesUnavailable) as caught:
        load_model_files(tmp_path, "m")
    assert caught.value.code == "too_large"


def test_geometry(tmp_path: Path) -> None:
    assert load_geometry(tmp_path) is None
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "num_hidden_layers": 4}
    write(tmp_path, config__json=config | {"torch_dtype": "float32"})
    assert load_geometry(tmp_path) == KvGeometry(layers=4, kv_heads=4, head_dim=32, dtype="float32")


def test_attention(tmp_path: Path) -> None:
    """In each of 3 layers scores and values of 2 heads of 4, for 4 x 8 x 8 and 3 x 8 x 10 weights."""
    assert load_attention(tmp_path) == 0.0
    config = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 10}
    write(tmp_path, config__json=config)
    assert load_attention(tmp_path) == 0.0, "without its feed-forward's width nothing can be told"
    write(tmp_path, config__json=config | {"intermediate_size": 10})
    assert load_attention(tmp_path) == 3 * 2 * 8 / (3 * 4 * 8 * 8 + 3 * 3 * 8 * 10)
    write(tmp_path, config__json=config | {"intermediate_size": 1, "hidden_size": 2, "head_dim": 1024})
    assert 0 < load_attention(tmp_path) <= 1.0

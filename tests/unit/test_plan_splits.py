"""`plan splits`: what each way of splitting a model leaves for KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from kv_models import DEEPSEEK_V3, GPT_OSS_120B, dense

from gateway.cli import main
from gateway.plan.inputs import Model, read_model
from gateway.plan.splits import Memory, split

MEMORY = Memory(gpu_bytes=80e9, reserve=0.1, weight_bytes=2)
LLAMA = read_model("llama-3-70b")


def written(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def model(tmp_path: Path, config: dict[str, Any]) -> Model:
    return read_model(written(tmp_path / "config.json", config))


@pytest.mark.parametrize(("tp", "pp", "kib"), [(1, 1, 320), (8, 1, 40), (1, 2, 160), (8, 2, 20), (16, 1, 40)])
def test_kv_of_llama_3_70b_on_one_gpu(tp: int, pp: int, kib: int) -> None:
    assert split(LLAMA, MEMORY, tp, pp, 1).gpu_bytes_per_token == kib * 1024


def test_tp_and_pp_give_one_sequence_more_room_and_dp_does_not() -> None:
    base = split(LLAMA, MEMORY, 4, 1, 1)
    assert base.tokens == base.sequence_tokens
    for tp, pp in ((8, 1), (4, 2)):
        assert (split(LLAMA, MEMORY, tp, pp, 1).sequence_tokens or 0) > 2 * (base.sequence_tokens or 0)
    doubled = split(LLAMA, MEMORY, 4, 1, 2)
    assert (doubled.sequence_tokens, doubled.tokens) == (base.sequence_tokens, 2 * base.tokens)


def test_more_ranks_than_heads_store_copies() -> None:
    eight, sixteen = split(LLAMA, MEMORY, 8, 1, 1), split(LLAMA, MEMORY, 16, 1, 1)
    assert (eight.head_copies, sixteen.head_copies) == (1, 2)
    assert sixteen.gpu_bytes_per_token == eight.gpu_bytes_per_token
    assert sixteen.stored_bytes_per_token == 2 * eight.stored_bytes_per_token == 640 * 1024


def test_what_fits_fits_and_one_token_more_does_not() -> None:
    """Weights and KV of the fullest stage, against the memory of a GPU; 80 layers on 3 stages are 27, 27 and 26."""
    for tp, pp in ((4, 1), (2, 3), (16, 1)):
        found = split(LLAMA, MEMORY, tp, pp, 1)
        geometry, shape = LLAMA.geometry, LLAMA.shape
        layers = {1: [80], 3: [27, 27, 26]}[pp]
        ends = shape.hidden * shape.vocab
        used = []
        for stage, count in enumerate(layers):
            weights = shape.layer_weights * count / 80 + ends * ((stage == 0) + (stage == pp - 1))
            per_token = count * geometry.heads_per_rank(tp) * geometry.row_bytes
            used.append((weights * 2 / tp, per_token))
        assert all(weights + found.tokens * each <= 72e9 for weights, each in used)
        assert any(weights + (found.tokens + 1) * each > 72e9 - 1 for weights, each in used)
        assert found.gpu_weight_bytes == pytest.approx(max(weights for weights, _ in used), abs=1)


def test_weights_that_do_not_fit_leave_no_room() -> None:
    found = split(LLAMA, MEMORY, 1, 1, 4)
    assert (found.tokens, found.sequence_tokens) == (0, 0)
    assert found.gpu_weight_bytes > MEMORY.gpu_bytes


def test_tied_weights_are_kept_once_on_one_stage_and_by_both_ends_of_several(tmp_path: Path) -> None:
    tied = model(tmp_path, dense(4, 4, 4, 64, 64, 1_000, tie_word_embeddings=True))
    vocabulary, layer = 64 * 1_000, tied.shape.layer_weights // 4
    assert split(tied, MEMORY, 1, 1, 1).gpu_weight_bytes == 2 * (vocabulary + 4 * layer)
    assert split(tied, MEMORY, 1, 2, 1).gpu_weight_bytes == 2 * (vocabulary + 2 * layer)


def test_windows_leave_room_for_longer_sequences(tmp_path: Path) -> None:
    found = split(model(tmp_path, GPT_OSS_120B), Memory(gpu_bytes=80e9, reserve=0.1, weight_bytes=0.55), 1, 1, 1)
    assert found.sequence_tokens is not None and found.sequence_tokens == pytest.approx(2 * found.tokens, rel=0.01)
    every = split(model(tmp_path, dense(4, 4, 4, 64, 64, 1_000, sliding_window=128)), MEMORY, 1, 1, 1)
    assert every.sequence_tokens is None


def test_a_latent_is_on_every_gpu(tmp_path: Path) -> None:
    found = split(model(tmp_path, DEEPSEEK_V3), MEMORY, 8, 1, 1)
    assert (found.gpu_bytes_per_token, found.head_copies, found.refused) == (70_272, 8, "")


def test_ways_that_engines_refuse_are_told(tmp_path: Path) -> None:
    assert split(LLAMA, MEMORY, 3, 1, 1).refused == "64 query heads do not divide by 3"
    odd = model(tmp_path, dense(4, 24, 8, 96, 64, 1_000))
    assert split(odd, MEMORY, 12, 1, 1).refused == "neither of 12 ranks and 8 KV heads divides the other"


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "splits.svg"
    command = ["plan", "splits", "--model", "llama-3-70b", "--tp", "8,16", "--pp", "1", "--plot", str(svg)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "DP does not" in text and "Expert parallelism changes nothing" in text
    assert "640 KiB a token for 320 KiB of KV, and 50% of its KV" in text.replace("\n  ", " ")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["tp"], each["dp"], each["head_copies"]) for each in found["splits"]] == [
        *((8, 1, 1.0), (8, 2, 1.0)),
        *((16, 1, 2.0), (16, 2, 2.0)),
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tp", "0"], "--tp: expected whole numbers"),
        (["--tp", "1,,2"], "--tp: expected whole numbers"),
        (["--dp", ""], "--dp: expected whole numbers"),
        (["--pp", "81"], "--pp: 81 stages cannot share 80 layers"),
        (["--gpu-bytes", "-1"], "--gpu-bytes: expected a number above 0"),
        (["--gpu-bytes", "nan"], "--gpu-bytes: expected a number above 0"),
        (["--reserve", "1"], "--reserve: expected a number of 0 or more and below 1"),
        (["--weight-bytes", "two"], "--weight-bytes: expected a number above 0"),
        (["--dtype", "int4"], "--dtype: 'int4' is not one of"),
        (["--model", "no-such-file"], "--model: no-such-file is neither a file nor one of llama-3-8b, llama-3-70b"),
        (["--plot", "no/such/directory.svg"], "--plot: "),
    ],
)
def test_a_bad_flag_is_named_in_one_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "splits", "--model", "llama-3-70b", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"prefix-gateway: {told}") and output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "is not a JSON object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"num_hidden_layers": 2}', "num_attention_heads: missing"),
        (json.dumps(dense(2, 4, 2, 8, 16, 10, index_topk=2048)), "index_topk: "),
    ],
)
def test_a_bad_config_is_told(tmp_path: Path, content: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "splits", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prefix-gateway: --model") and told in error and error.count("\n") == 1

"""The paged model against transformers' Llama."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_support import tiny_directory

from replica_agent.reference.errors import ModelError
from replica_agent.reference.kv_cache import PagedKv
from replica_agent.reference.model import Llama, Span
from replica_agent.reference.rope import Rope
from replica_agent.reference.weights import ModelConfig, Weights, resolve_dtype

Reference = Callable[[list[int]], torch.Tensor]
BLOCKS, SIZE = 64, 8


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Logits of every position, from transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32)

    def run(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    return run


def make(dtype: torch.dtype = torch.float32) -> Llama:
    torch.set_num_threads(1)
    config = ModelConfig.load(tiny_directory())
    kv = PagedKv(config, BLOCKS, SIZE, dtype)
    return Llama(config, Weights.load(tiny_directory(), config, dtype), kv, BLOCKS * SIZE)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2048) for _ in range(length)]


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_one_prompt_at_once(reference: Reference) -> None:
    tokens = prompt(random.Random(0), 300)
    assert close(make().forward([Span(tokens, 0, list(range(40)))])[0], reference(tokens)[-1])


@pytest.mark.parametrize("seed", range(5))
def test_chunks_and_decodes_of_several_sequences_in_scattered_blocks(reference: Reference, seed: int) -> None:
    rng = random.Random(seed)
    model = make()
    free = list(range(BLOCKS))
    rng.shuffle(free)
    sequences = []
    for length in (1, 3, 60, 150, 200):
        tokens = prompt(rng, length)
        blocks = [free.pop() for _ in range(-(-length // SIZE))]
        sequences.append({"tokens": tokens, "blocks": blocks, "done": 0, "want": reference(tokens)})
    compared = 0
    while unfinished := [each for each in sequences if each["done"] < len(each["tokens"])]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        spans = []
        for each in chosen:
            count = min(rng.choice((1, 1, 7, 130)), len(each["tokens"]) - each["done"])
            spans.append(Span(each["tokens"][each["done"] :][:count], each["done"], each["blocks"]))
        for each, span, logits in zip(chosen, spans, model.forward(spans), strict=True):
            each["done"] = span.end
            assert close(logits, each["want"][span.end - 1])
            compared += 1
    assert compared >= len(sequences)


def test_bfloat16_stays_near_float32(reference: Reference) -> None:
    tokens = prompt(random.Random(1), 200)
    model = make(torch.bfloat16)
    table = list(range(25))
    model.forward([Span(tokens[:150], 0, table)])
    logits = model.forward([Span(tokens[150:], 150, table)])[0]
    want = reference(tokens)[-1]
    divergence = (want.softmax(-1) * (want.log_softmax(-1) - logits.log_softmax(-1))).sum()
    assert float(divergence) < 0.01


def test_a_block_holds_all_layers_of_its_tokens_and_nothing_else() -> None:
    model = make()
    kv = model.kv
    model.forward([Span(prompt(random.Random(2), 2 * SIZE), 0, [5, 9])])
    written = (kv.blocks != 0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [5, 9]
    assert bool((kv.blocks[[5, 9]] != 0).any(dim=-1).all())
    assert kv.blocks.shape == (BLOCKS, 2, 4, 2, SIZE, 32)
    assert kv.block_bytes == kv.blocks[5].numel() * 4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_kinds_match(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = json.loads((tiny_directory() / "config.json").read_text())
    del raw["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": rope}))
    config = ModelConfig.load(tmp_path)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw, rope_parameters=rope))
    positions = torch.arange(500)
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), positions.unsqueeze(0))
    mine = Rope(config, 500, torch.float32).at(positions)
    assert torch.allclose(mine[0][:, 0], cos[0, :, :16], atol=1e-5)
    assert torch.allclose(mine[1][:, 0], sin[0, :, :16], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    raw = json.loads((tiny_directory() / "config.json").read_text()) | change
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=named):
        ModelConfig.load(tmp_path)


def test_missing_and_damaged_weights_are_told(tmp_path: Path) -> None:
    config = ModelConfig.load(tiny_directory())
    with pytest.raises(ModelError, match="safetensors"):
        Weights.load(tmp_path, config, torch.float32)
    whole = (tiny_directory() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Weights.load(tmp_path, config, torch.float32)


def test_auto_keeps_a_float32_checkpoint_in_float32() -> None:
    config = ModelConfig.load(tiny_directory())
    assert resolve_dtype("auto", config) == "float32"
    assert resolve_dtype("bfloat16", config) == "bfloat16"

"""A tiny random Llama with a tokenizer of its own, made from a seed: the same engine to test against, in megabytes."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replica_agent.reference.prepare import Report

_SEED = 7
_VOCAB = 4096
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|system|>\\nTools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' ~ message['role']) }}
{%- endif %}
{{- '<|' ~ message['role'] ~ '|>\\n' }}
{%- if message['content'] %}{{- message['content'] }}{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<call>' }}{{- call['function'] | tojson }}{{- '</call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""


def build_tiny(directory: Path, report: Report) -> None:
    """Write config, float32 weights, tokenizer and chat template. Takes a second or two."""
    report(0.1, "training a tokenizer")
    _write_tokenizer(directory)
    report(0.6, "drawing random weights")
    _write_weights(directory)


def _corpus(rng: random.Random) -> Iterator[str]:
    """English (the standard library's own help texts) and JSON records, so that chats and tool calls take about as many
    tokens as with a real tokenizer."""
    from pydoc_data.topics import topics

    yield from topics.values()
    words = sorted({word.lower() for text in topics.values() for word in text.split() if word.isalpha()})
    for number in range(1_600):
        record = json.dumps({_name(rng, words): _value(rng, words) for _ in range(8)})
        yield json.dumps({"arguments": record}) if number % 8 == 0 else record


def _name(rng: random.Random, words: Sequence[str]) -> str:
    return "_".join(rng.sample(words, rng.randint(1, 2)))


def _value(rng: random.Random, words: Sequence[str]) -> object:
    choices: tuple[Callable[[], object], ...] = (
        lambda: rng.randint(0, 999),
        lambda: (
            f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randint(0, 23):02}:00:00"
        ),
        lambda: "".join(rng.choices(string.ascii_uppercase, k=3)) + f"{rng.randint(0, 999):03}",
        lambda: f"{_name(rng, words)}_{rng.randint(1000, 9999)}",
        lambda: rng.choice((True, False, None)),
        lambda: rng.choice(words),
    )
    return rng.choice(choices)()


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random.Random(_SEED)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIALS[0],
            "eos_token": _SPECIALS[1],
            "pad_token": _SPECIALS[2],
            "model_max_length": _CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(_TEMPLATE)


def _write_weights(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(_SEED)
    hidden, ffn, head_dim = 128, 384, 32
    queries, keys = 4 * head_dim, 2 * head_dim

    # Wide enough that the most likely token leads clearly: output must not hinge on rounding.
    def draw(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": draw(_VOCAB, hidden, scale=1.0)}
    for index in range(4):
        layer = f"model.layers.{index}."
        tensors |= {
            f"{layer}input_layernorm.weight": torch.ones(hidden),
            f"{layer}self_attn.q_proj.weight": draw(queries, hidden),
            f"{layer}self_attn.k_proj.weight": draw(keys, hidden),
            f"{layer}self_attn.v_proj.weight": draw(keys, hidden),
            f"{layer}self_attn.o_proj.weight": draw(hidden, queries),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}mlp.gate_proj.weight": draw(ffn, hidden),
            f"{layer}mlp.up_proj.weight": draw(ffn, hidden),
            f"{layer}mlp.down_proj.weight": draw(hidden, ffn),
        }
    tensors |= {"model.norm.weight": torch.ones(hidden), "lm_head.weight": draw(_VOCAB, hidden)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _CONFIG)
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")

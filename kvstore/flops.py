"""How many floating-point operations a prefill takes, and how many weights a model has, from its own description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.cost import attended
from kvstore.errors import GeometryError
from kvstore.models import language_model, positive, read_attention

_UNGATED = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose feed-forward layers have two matrices; all others have a third, the gate."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configs call the number of experts."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill time and memory depend on. Weights are counts; norms, biases and draft layers are left out.

    `active_weights` are multiplied for every token: attention, router, and the experts that a token is routed to.
    `layer_weights` are all weights of all layers. `score_dims` is what one query head spends per position it attends
    to: the dims of its key and of its value. `expand_dims`: latent attention rebuilds keys and values of that many
    multiplications per cached position and layer. `windows` as in `KvGeometry`; `max_tokens` 0 where the config says no
    longest context.
    """

    layers: int
    heads: int
    score_dims: int
    windows: tuple[int, ...]
    hidden: int
    vocab: int
    tied: bool
    active_weights: int
    layer_weights: int
    expand_dims: int = 0
    max_tokens: int = 0

    @property
    def head_flops(self) -> int:
        """Operations of the output head, which only the last token of a prompt needs."""
        return 2 * self.hidden * self.vocab

    @property
    def full_layers(self) -> int:
        """Layers that attend to all of the context."""
        return self.layers - sum(window > 0 for window in self.windows)

    @property
    def pair_flops(self) -> int:
        """Operations for each position that a token attends to, over all full layers: scores, and their product with
        the values."""
        return 2 * self.heads * self.score_dims * self.full_layers

    @property
    def attention(self) -> float:
        """How much longer a token takes for each one before it, as a share of the first one's: in operations of the
        full layers. Windowed layers stop growing early, and a latent context is rebuilt once a step; both are left out.
        """
        return self.pair_flops / (2 * self.active_weights)

    @property
    def vocab_weights(self) -> int:
        """Weights of the embedding, and again of the output head where the two are not one."""
        return self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """All weights of the model."""
        return self.layer_weights + self.vocab_weights

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face `config.json`. Raises GeometryError naming the field."""
        model = language_model(config)
        attention = read_attention(model)
        heads, hidden = attention.heads, positive(model, "hidden_size")
        if attention.value_dim:
            score_dims, expand = attention.key_dim + attention.value_dim, 0
            # Queries and the output projection have the dims of all heads, keys and values those of the KV heads.
            attention_weights = hidden * (heads + attention.kv_heads) * score_dims
        else:
            score_dims, expand, attention_weights = _latent(model, heads, hidden)
        active, total = _feed_forward(model, hidden, attention.layers)
        return cls(
            layers=attention.layers,
            heads=heads,
            score_dims=score_dims,
            windows=attention.windows,
            hidden=hidden,
            vocab=positive(model, "vocab_size"),
            tied=bool(model.get("tie_word_embeddings")),
            active_weights=attention_weights * attention.layers + active,
            layer_weights=attention_weights * attention.layers + total,
            expand_dims=expand,
            max_tokens=positive(model, "max_position_embeddings", 0),
        )


def prefill_flops(shape: ModelShape, tokens: int, context: int = 0) -> int:
    """Operations of computing `tokens` new tokens after `context` cached ones: weights, attention, one output head.

    A multiplication and an addition count as two. Latent attention rebuilds the keys and values of the context, too,
    which a fetch does not save.
    """
    if not tokens:
        return 0
    pairs = shape.full_layers * attended(tokens, context)
    pairs += sum(attended(tokens, context, window) for window in shape.windows if window)
    linear = tokens * shape.active_weights
    scores = shape.heads * shape.score_dims * pairs
    expansion = shape.layers * shape.expand_dims * context
    return 2 * (linear + scores + expansion) + shape.head_flops


def _latent(model: Mapping[str, Any], heads: int, hidden: int) -> tuple[int, int, int]:
    """Score dims, multiplications to rebuild one position, and weights a layer, of latent attention."""
    rank, rope = positive(model, "kv_lora_rank"), positive(model, "qk_rope_head_dim")
    plain, value = positive(model, "qk_nope_head_dim"), positive(model, "v_head_dim")
    rebuild = rank * heads * (plain + value)
    query_rank = positive(model, "q_lora_rank", 0)
    query_in = hidden * query_rank if query_rank else 0
    query = query_in + (query_rank or hidden) * heads * (plain + rope)
    weights = query + hidden * (rank + rope) + rebuild + heads * value * hidden
    return plain + rope + value, rebuild, weights


def _feed_forward(model: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int]:
    """Weights of all feed-forward layers: those a token uses, and all."""
    matrix = hidden * (2 if str(model.get("model_type")) in _UNGATED else 3)
    experts = next((positive(model, field) for field in _EXPERTS if model.get(field)), 0)
    if not experts:
        dense = layers * matrix * positive(model, "intermediate_size")
        return dense, dense
    routed = positive(model, "num_experts_per_tok")
    if routed > experts:
        raise GeometryError(f"num_experts_per_tok: {routed} of {experts} experts")
    width_field = "moe_intermediate_size" if model.get("moe_intermediate_size") else "intermediate_size"
    expert = matrix * positive(model, width_field)
    always = hidden * experts + expert * _count(model, "n_shared_experts")
    always += matrix * _count(model, "shared_expert_intermediate_size")
    dense_layers = _dense_layers(model, layers)
    dense = dense_layers * matrix * positive(model, "intermediate_size") if dense_layers else 0
    sparse = layers - dense_layers
    return sparse * (always + routed * expert) + dense, sparse * (always + experts * expert) + dense


def _dense_layers(model: Mapping[str, Any], layers: int) -> int:
    """How many of a model's layers have one feed-forward instead of experts: the first few, or all but every n-th."""
    first, step = _count(model, "first_k_dense_replace"), _count(model, "decoder_sparse_step") or 1
    named = model.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise GeometryError(f"mlp_only_layers: expected a list, got {named!r}")
    return sum(layer < first or (layer + 1) % step != 0 or layer in named for layer in range(layers))


def _count(model: Mapping[str, Any], field: str) -> int:
    """A whole number, 0 where absent. Raises GeometryError naming the field."""
    return positive(model, field) if model.get(field) else 0

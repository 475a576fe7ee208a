"""The sizes of a decoder-only transformer, read off its config.json: nothing is loaded and no library is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import ModelError

# Pre-norm decoders with RMSNorm, rotary positions and a gated feed-forward: what the formulas here describe.
FAMILIES = ("llama", "mistral", "qwen2")
# Sizes that a Llama's config.json may leave out, as transformers fills them in.
LLAMA_DEFAULTS = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}


@dataclass(frozen=True)
class Shape:
    """V ``vocabulary``, H ``hidden``, F ``intermediate``, ``layers``, attention of ``heads`` and ``kv_heads``.

    ``tied``: the unembedding is the input embedding. ``bias`` counts bias terms of one layer.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    positions: int | None = None
    bias: int = 0

    @property
    def query_width(self) -> int:
        """heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """kv_heads x head_dim, smaller than ``query_width`` with grouped queries."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, V x H."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer: queries and output 2HQ, keys and values 2HK, SwiGLU 3HF, two norms 2H, biases."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden + self.bias

    @property
    def linear(self) -> int:
        """Parameters of the matrices of all layers."""
        return self.layers * (self.layer - 2 * self.hidden - self.bias)

    @property
    def backbone(self) -> int:
        """Parameters without any head: embedding, layers, last norm."""
        return self.embedding + self.layers * self.layer + self.hidden

    @property
    def causal_lm(self) -> int:
        """Parameters of a policy."""
        return self.backbone + (0 if self.tied else self.embedding)

    @property
    def scalar(self) -> int:
        """Parameters of a critic or of a loaded reward model: the backbone and one scalar head."""
        return self.backbone + self.hidden

    @property
    def reward_in_training(self) -> int:
        """A reward model in training keeps an untied unembedding for its imitation loss."""
        return self.scalar + (0 if self.tied else self.embedding)

    def adapters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Parameters of LoRA pairs A (r x in), B (out x r) on the maps of the layers named ``targets``, none for all
        (Hu et al. 2021)."""
        h, q, kv, f = self.hidden, self.query_width, self.kv_width, self.intermediate
        maps = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
        maps |= {"gate_proj": h + f, "up_proj": h + f, "down_proj": f + h}
        return rank * self.layers * sum(ends for name, ends in maps.items() if not targets or name in targets)


def shape_of_config(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a config.json describes; ``ModelError`` for a family that the formulas do not hold for."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{name} is of type {family!r}; memory can be planned for {known} (and what is built like them)"
        )
    values = {**LLAMA_DEFAULTS, **config} if family == "llama" else dict(config)
    try:
        hidden, heads = int(values["hidden_size"]), int(values.get("num_attention_heads") or 32)
        kv_heads = int(values.get("num_key_value_heads") or heads)
        head_dim = int(values.get("head_dim") or hidden // heads)
        return Shape(
            vocabulary=int(values["vocab_size"]),
            hidden=hidden,
            intermediate=int(values["intermediate_size"]),
            layers=int(values["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tied=bool(values.get("tie_word_embeddings", False)),
            positions=values.get("max_position_embeddings"),
            bias=_biases(values, hidden, heads * head_dim, kv_heads * head_dim),
        )
    except KeyError as error:
        raise ModelError(f"{name} has no {error.args[0]}; it is not the config.json of a language model") from error


def _biases(config: Mapping[str, Any], hidden: int, query: int, kv: int) -> int:
    """Bias terms of one layer: Qwen2 has them on queries, keys and values; Llama where its settings say so."""
    if config["model_type"] == "qwen2":
        return query + 2 * kv
    attention = query + 2 * kv + hidden if config.get("attention_bias") else 0
    feed_forward = 2 * int(config["intermediate_size"]) + hidden if config.get("mlp_bias") else 0
    return attention + feed_forward

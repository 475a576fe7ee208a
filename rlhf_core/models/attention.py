"""Which attention a model computes with: PyTorch's fused kernels, or plain products where the architecture has none."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def attention_of(auto_class: Any, config: PretrainedConfig) -> str:
    """``sdpa``, scaled-dot-product attention, or ``eager`` for an architecture that cannot have it.

    Gemma 2 is such a one, whose scores have a soft cap, and BLOOM. Eager attention holds the scores of all positions.

    Args:
        auto_class: ``AutoModelForCausalLM`` or another of its kind, by which the model is made.
        config: The model's.
    """
    known = type(config) in auto_class._model_mapping
    return "sdpa" if not known or auto_class._model_mapping[type(config)]._supports_sdpa else "eager"

"""A scalar model on the lower layers of a language model.

What tells a good reply from a bad one is often most linear in the middle of a language model: its upper layers turn to
predicting the next token (Skean et al., 2025, "Layer by Layer: Uncovering Hidden Representations in Language Models").
Without them a reward model is cheaper to train and to ask.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.errors import ModelError


def keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    """Remove the decoder layers above the lowest ``layers``, in place; the last norm stays.

    Args:
        model: A decoder, with or without a head.

    Raises:
        ModelError: The model has fewer layers, or keeps them in a form that is not known here.
    """
    backbone: Any = model.base_model
    # A head may come with a configuration of its own, which knows of fewer layers already.
    depth = backbone.config.num_hidden_layers
    if layers > depth:
        raise ModelError(f"layers is {layers}, but {type(model).__name__} has {depth} layers")
    stack = decoder_layers(model)
    if stack is None:
        raise ModelError(f"the layers of {type(backbone).__name__} cannot be told apart; remove the setting layers")
    (name,) = [name for name, child in backbone.named_children() if child is stack]
    setattr(backbone, name, stack[:layers])
    for config in (model.config, backbone.config):
        limit_layers(config, layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of the model's decoder layers, from the embedding up; None where it cannot be told apart."""
    backbone: Any = model.base_model
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    stacks = [child for child in lists if len(child) == backbone.config.num_hidden_layers]
    return stacks[0] if len(stacks) == 1 else None


def limit_layers(config: PretrainedConfig, layers: int) -> None:
    """Make ``config`` that of its lowest ``layers`` layers, in place."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]

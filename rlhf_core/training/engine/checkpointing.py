"""Gradient checkpointing: activations inside a layer are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.errors import ModelError


def recomputing(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the layers of ``model`` recompute their activations; ``ModelError`` if it has no such layers.

    A layer does so only in training mode, which PPO never enters (drop-out would make the trainer's probabilities
    differ from the sampler's). So inside the context the layer itself counts as training, and its parts do not.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that support gradient_checkpointing; switch it off")
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]

    @contextmanager
    def context() -> Iterator[None]:
        modes = [layer.training for layer in layers]
        for layer in layers:
            layer.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for layer, mode in zip(layers, modes, strict=True):
                layer.training = mode

    return context

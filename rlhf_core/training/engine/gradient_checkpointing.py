"""Gradient checkpointing: activations inside a layer are recomputed in the backward pass instead of stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.errors import ModelError


def recomputing(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the layers of ``model`` recompute their activations.

    Layers of transformers do so only in training mode, which PPO never enters (drop-out would make the trainer's
    probabilities differ from the sampler's). So the context sets the training flag of the layer itself and leaves its
    submodules in evaluation mode.

    Raises:
        ModelError: The model has no layers that support it.
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

"""Which engine trains a model, and with which of its activations stored.

The settings of the run choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.config.model import LoraConfig, OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.architecture import recomputable_layers
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import Engine, LocalEngine
from rlhf_core.training.run_context import RunContext


def recomputing(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the layers of ``model`` recompute their activations.

    Layers of transformers do so only in training mode, which PPO never enters (drop-out would make
    the trainer's probabilities differ from the sampler's). So the context sets the training flag of
    the layer itself and leaves its submodules in evaluation mode.

    Raises:
        ModelError: The model has no layers that support it.
    """
    layers = recomputable_layers(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that support gradient_checkpointing; switch it off"
        )
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


Model = TypeVar("Model", bound=nn.Module)


def device_before(launch: LaunchConfig, lora: LoraConfig | None = None) -> torch.device | None:
    """Where to load a model that an engine trains.

    That is the host for ZeRO 3, which never holds it whole on a device.

    One that is packed into 4 bits is packed where it stays.
    """
    return (
        torch.device("cpu")
        if launch.zero == 3 and (lora is None or lora.quantize is None)
        else None
    )


def build_engine(
    model: nn.Module,
    config: OptimizerConfig,
    total_steps: int,
    name: str,
    context: RunContext,
    warmup_steps: int | None = None,
) -> Engine:
    """The engine that trains ``model``, as ``context.launch`` chooses it.

    Args:
        name: Names the model in messages.
        warmup_steps: Takes the place of the share of steps that ``config`` sets.

    Raises:
        RlhfError: The engine needs a package that is not installed.
    """
    launch = context.launch
    engine: Engine
    if launch.engine == "local":
        engine = LocalEngine(model, config, total_steps, name, warmup_steps)
    else:
        from rlhf_core.training.engine.deepspeed import DeepSpeedEngine

        engine = DeepSpeedEngine(
            model, config, total_steps, name, warmup_steps, launch, context.folder
        )
    if launch.gradient_checkpointing:
        engine.forward_context = recomputing(model)
    return engine


def finish(engine: Engine, model: Model) -> Model:
    """End training: return the whole trained model on rank 0 and release the other ranks.

    Args:
        model: The model that ``engine`` was built with.
    """
    released = engine.release()
    distributed.release_nonzero_ranks()
    if not isinstance(released, type(model)):
        raise ModelError(
            f"{engine.name}: the engine returned a {type(released).__name__}, not a {type(model).__name__}"
        )
    return released

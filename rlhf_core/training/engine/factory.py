"""Which engine trains a model: chosen by the launch settings of the run."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import ModelError
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.gradient_checkpointing import recomputing
from rlhf_core.training.engine.local import LocalEngine
from rlhf_core.training.run_context import RunContext

Model = TypeVar("Model", bound=nn.Module)


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

        engine = DeepSpeedEngine(model, config, total_steps, name, warmup_steps, launch, context.folder)
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

"""Which engine trains a model: decided by the launch settings that the stage's runner has put in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from rlhf_core import distributed
from rlhf_core.config.launch import LaunchConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.errors import ModelError
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.checkpointing import recomputing
from rlhf_core.training.engine.local import LocalEngine

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Placement:
    """Launch settings, and the folder (the workspace) that relative files in them belong to."""

    launch: LaunchConfig
    folder: Path


_PLACEMENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def placed(launch: LaunchConfig, folder: Path) -> Iterator[None]:
    """Engines built inside follow ``launch``; outside of any such block they are local."""
    token = _PLACEMENT.set(Placement(launch, folder))
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def placement() -> Placement:
    """What is in force."""
    return _PLACEMENT.get() or Placement(LaunchConfig(), Path())


def build_engine(
    model: nn.Module, config: OptimizerConfig, total_steps: int, name: str, warmup_steps: int | None = None
) -> Engine:
    """The engine that trains ``model``. ``RlhfError`` when it needs a package that is not installed."""
    launch, folder = placement().launch, placement().folder
    engine: Engine
    if launch.engine == "local":
        engine = LocalEngine(model, config, total_steps, name, warmup_steps)
    else:
        from rlhf_core.training.engine.deepspeed import DeepSpeedEngine

        engine = DeepSpeedEngine(model, config, total_steps, name, warmup_steps, launch, folder)
    if launch.gradient_checkpointing:
        engine.forward_context = recomputing(model)
    return engine


def finish(engine: Engine, model: Model) -> Model:
    """The trained model, whole, on the first rank, which goes on alone; the work of the other ranks ends here.

    ``model`` is the one that the engine was given.
    """
    released = engine.release()
    distributed.release_nonzero_ranks()
    if not isinstance(released, type(model)):
        raise ModelError(f"{engine.name}: the engine left a {type(released).__name__}, not a {type(model).__name__}")
    return released

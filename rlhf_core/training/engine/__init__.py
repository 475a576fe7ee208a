"""Engines: their interface (``base``), plain torch (``local``), DeepSpeed, and the choice of one (``factory``)."""

from rlhf_core.training.engine.base import (
    Engine,
    EngineState,
    StepResult,
    clip_scale,
    joint_step,
)
from rlhf_core.training.engine.local import LocalEngine

__all__ = [
    "Engine",
    "EngineState",
    "LocalEngine",
    "StepResult",
    "clip_scale",
    "joint_step",
]

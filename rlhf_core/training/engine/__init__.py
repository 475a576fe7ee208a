"""Engines: interface and plain torch (``base``), DeepSpeed, and the choice of one (``factory``)."""

from rlhf_core.training.engine.base import (
    Engine,
    EngineState,
    LocalEngine,
    StepResult,
    clip_scale,
    joint_step,
)

__all__ = [
    "Engine",
    "EngineState",
    "LocalEngine",
    "StepResult",
    "clip_scale",
    "joint_step",
]

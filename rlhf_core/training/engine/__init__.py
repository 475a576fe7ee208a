"""Engines: what trainers know of them (``base``), plain torch on one or several ranks (``local``), and who chooses."""

from rlhf_core.training.engine.base import (
    Engine,
    EngineState,
    StepResult,
    clip_scale,
    joint_norm,
    joint_step,
)
from rlhf_core.training.engine.local import LocalEngine

__all__ = [
    "Engine",
    "EngineState",
    "LocalEngine",
    "StepResult",
    "clip_scale",
    "joint_norm",
    "joint_step",
]

"""Global gradient clip: ``g * min(1, max_norm / ||g||)`` over all parameters together (algorithms.md §6, PPO-max).

``separate`` takes the norms of policy and critic each; ``joint`` takes one norm over both, as MOSS-RLHF does, which
puts both into one optimiser. Gradients are scaled in the engine's step, since a sharding engine alone knows the norm
over all ranks; here is decided whose norm counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlhf_core.training.engine import Engine, StepResult, joint_step


def clip_and_step(
    engines: Mapping[str, Engine], norm: Literal["separate", "joint"], max_norm: float | None
) -> dict[str, StepResult]:
    """Clip the accumulated gradients by their global norm and make one optimiser step of every engine.

    Args:
        engines: The engines by name.
        norm: Whether each engine's gradients are clipped by their own norm or by that of all of them.
        max_norm: The bound of the joint norm; separate norms are bounded by each engine's own.

    Returns:
        The results by the engines' names. A step whose norm is not finite was skipped.
    """
    if norm == "joint":
        return dict(zip(engines, joint_step(list(engines.values()), max_norm), strict=True))
    return {name: engine.step() for name, engine in engines.items()}

"""What several models of a stage need together: while they are held, at work, loaded whole, or stepped."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.memory.inputs import ModelRole
from rlhf_core.memory.tensor_memory import MemoryUse


def optimizer_step(roles: Sequence[ModelRole]) -> MemoryUse:
    """The optimiser step of ``roles`` together: all their gradients, and what DeepSpeed makes of them."""
    footprints = [role.footprint for role in roles]
    return MemoryUse(gradients=sum(one.gradients for one in footprints), other=sum(one.at_step for one in footprints))


def held(roles: Sequence[ModelRole]) -> MemoryUse:
    return sum((role.footprint.held for role in roles), MemoryUse())


def at_work(roles: Sequence[ModelRole]) -> MemoryUse:
    """Weights that rollouts, selection and evaluation need on top."""
    return MemoryUse(weights=sum(role.footprint.sampling for role in roles))


def whole(*roles: ModelRole) -> MemoryUse:
    """Models as they are loaded, before they are sharded or moved away."""
    return MemoryUse(weights=sum(role.footprint.whole for role in roles))


def gathered_by_one(roles: Sequence[ModelRole]) -> MemoryUse:
    """What the neediest frozen model gathers; they run one after the other."""
    return MemoryUse(weights=max((role.footprint.running for role in roles), default=0))

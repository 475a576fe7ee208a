"""The plan of a recipe: every stage's memory per GPU, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_core.config.loading.problems import nearest
from rlhf_core.errors import ConfigError
from rlhf_core.memory.evaluation import evaluate_stage
from rlhf_core.memory.reinforcement import critic_stage, ppo_stage
from rlhf_core.memory.setting import Recipe, Setting, StagePlan
from rlhf_core.memory.supervised import reward_stage, sft_stage

GIB = 1 << 30
# The CUDA context with its libraries' work space, and the share that the allocator loses to fragments.
CONTEXT = 1 * GIB
FRAGMENTS = 0.05

STAGES: dict[str, Callable[[Setting], StagePlan]] = {
    "sft": sft_stage,
    "reward": lambda setting: reward_stage(setting, "reward"),
    "referee": lambda setting: reward_stage(setting, "referee"),
    "critic": critic_stage,
    "ppo": ppo_stage,
    "evaluate": evaluate_stage,
}


@dataclass(frozen=True)
class Plan:
    """``limit`` is what tensors may take of one GPU, in bytes; None where the GPU's memory is not known."""

    recipe: Recipe
    stages: tuple[StagePlan, ...]
    limit: int | None

    @property
    def worst(self) -> StagePlan:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak.use.total)

    @property
    def peak(self) -> int:
        """Bytes of tensors on one GPU at the worst moment of all stages."""
        return self.worst.peak.use.total

    @property
    def fits(self) -> bool:
        """Whether the peak keeps the limit; true where none is known."""
        return self.limit is None or self.peak <= self.limit


def usable(gpu_memory_gib: float) -> int:
    """Bytes that tensors may take of a GPU: its memory without context, divided by what fragments cost."""
    return max(int((gpu_memory_gib * GIB - CONTEXT) / (1 + FRAGMENTS)), 0)


def make_plan(recipe: Recipe, stages: Sequence[str] = tuple(STAGES)) -> Plan:
    """Estimate ``stages`` against ``plan.gpu_memory_gb``. ``ConfigError`` for a stage that runs no model."""
    for name in stages:
        if name not in STAGES:
            raise ConfigError(f"stage '{name}' is not one that memory is planned for; {nearest(name, STAGES)}")
    memory = recipe.params.plan.gpu_memory_gb
    plans = tuple(STAGES[name](recipe.setting(name)) for name in STAGES if name in stages)
    return Plan(recipe, plans, usable(memory) if memory is not None else None)

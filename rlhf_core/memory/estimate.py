"""The memory estimate of a recipe: every stage's memory per GPU, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.config.loading.load import Params, check_params
from rlhf_core.config.loading.overlay import overridden
from rlhf_core.config.loading.problems import nearest
from rlhf_core.errors import ConfigError
from rlhf_core.memory.architecture import Architecture
from rlhf_core.memory.sequence_lengths import SequenceLengths
from rlhf_core.memory.sharding import DeviceBudget, parallel_layout
from rlhf_core.memory.stage_inputs import StageInputs
from rlhf_core.memory.stages import STAGES, StageEstimate


@dataclass(frozen=True)
class EstimateInputs:
    """Settings, the starting model and the lengths of sequences. Relative files of the settings start at ``root``."""

    params: Params
    architecture: Architecture
    lengths: SequenceLengths
    root: Path

    def estimate(self, stage: str) -> StageEstimate:
        """One stage. ``ConfigError`` where its launch settings contradict one another."""
        layout = parallel_layout(self.params, stage, self.root)
        return STAGES[stage](StageInputs(self.params, self.architecture, self.lengths, layout, self.root))

    def with_changes(self, changes: Mapping[str, Any]) -> EstimateInputs:
        """The same with each ``section.key`` of ``changes``; ``ConfigError`` when the result contradicts itself."""
        document = self.params.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return replace(self, params=check_params(overridden(document, changes), "parameters"))


@dataclass(frozen=True)
class MemoryEstimate:
    """``limit`` is what tensors may take of one GPU, in bytes; None where the GPU's memory is not known."""

    inputs: EstimateInputs
    stages: tuple[StageEstimate, ...]

    @property
    def limit(self) -> int | None:
        """Bytes that tensors may take of one GPU; None where ``plan.gpu_memory_gb`` is not set."""
        memory = self.inputs.params.plan.gpu_memory_gb
        return DeviceBudget(memory).usable if memory is not None else None

    @property
    def worst(self) -> StageEstimate:
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


def estimate_memory(inputs: EstimateInputs, stages: Sequence[str] = tuple(STAGES)) -> MemoryEstimate:
    """Estimate ``stages``. ``ConfigError`` for a stage that runs no model."""
    for name in stages:
        if name not in STAGES:
            raise ConfigError(f"stage '{name}' is not one that memory is planned for; {nearest(name, STAGES)}")
    return MemoryEstimate(inputs, tuple(inputs.estimate(name) for name in STAGES if name in stages))

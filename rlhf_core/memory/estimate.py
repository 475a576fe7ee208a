"""The memory estimate: of each phase, of each stage, and of a whole recipe against its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.memory.inputs import EstimateInputs, ModelRole
from rlhf_core.memory.sharding import DeviceBudget, ParallelLayout
from rlhf_core.memory.tensor_memory import MemoryUse
from rlhf_core.stages.runtime.threads import KEPT_AT_THE_END

# Of a stage's process on a CPU beside its tensors: Python and the libraries once all are imported. See docs/plan.md.
PROCESS_BASE = 600 << 20
# An allowance for what a process in bfloat16 holds beyond that and beyond tensors: stages of SmolLM2-135M held 0.7 to
# 1.1 GiB more than was planned without it. Its cause is not established; see docs/plan.md.
BFLOAT16_ALLOWANCE = 896 << 20


@dataclass(frozen=True)
class PhaseEstimate:
    """``use`` at the phase's peak, everything that the stage holds meanwhile included."""

    name: str
    use: MemoryUse


@dataclass(frozen=True)
class StageEstimate:
    """One stage on one GPU."""

    stage: str
    layout: ParallelLayout
    roles: tuple[ModelRole, ...]
    phases: tuple[PhaseEstimate, ...]

    @property
    def peak(self) -> PhaseEstimate:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.use.total)

    @property
    def host(self) -> int:
        """Bytes of host memory for offloaded models and optimiser state, for each GPU."""
        return sum(role.footprint.host for role in self.roles)

    @property
    def freed(self) -> int:
        """Bytes of freed tensors that the allocator keeps: as much as it is told to, and at most what there was."""
        return min(KEPT_AT_THE_END, self.peak.use.total)

    @property
    def allowance(self) -> int:
        """Bytes that processes in bfloat16 held beyond all that is accounted for; those in float32 held none."""
        return BFLOAT16_ALLOWANCE if self.layout.precision == "bfloat16" else 0

    @property
    def process(self) -> int | None:
        """Bytes of the whole process where it runs on a CPU; None of a stage of several processes, or of DeepSpeed."""
        if self.layout.engine != "local" or self.layout.gpus > 1:
            return None
        return PROCESS_BASE + self.peak.use.total + self.freed + self.allowance + self.host


@dataclass(frozen=True)
class MemoryEstimate:
    """All stages that were asked for, and the inputs of their estimate."""

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

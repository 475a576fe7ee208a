"""Everything that an estimate depends on, and what a phase of a stage was estimated to need."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.config.load import Params
from rlhf_core.plan.lengths import Lengths
from rlhf_core.plan.placement import Placement
from rlhf_core.plan.roles import Role, frozen, trained
from rlhf_core.plan.shapes import Shape
from rlhf_core.plan.usage import Use, peak, total


@dataclass(frozen=True)
class Setting:
    """Settings, the starting model's shape, the placement of one job, and the lengths of its sequences."""

    params: Params
    shape: Shape
    placement: Placement
    lengths: Lengths

    def trained(self, name: str, parameters: int) -> Role:
        """A trained model of the setting's shape, or with LoRA its adapters."""
        rank = self.placement.lora_rank
        return trained(name, parameters, self.shape.adapters(rank) if rank else 0, self.placement)

    def frozen(self, name: str, parameters: int) -> Role:
        """A frozen model."""
        return frozen(name, parameters, self.placement)


@dataclass(frozen=True)
class Phase:
    """``use`` at the phase's peak, everything that the stage holds meanwhile included."""

    name: str
    use: Use


@dataclass(frozen=True)
class StagePlan:
    """One stage on one GPU."""

    stage: str
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.use.total)

    @property
    def host(self) -> int:
        """Host memory for offloaded models and optimiser state, for each GPU."""
        return sum(role.host for role in self.roles)


def stage_plan(stage: str, roles: list[Role], phases: dict[str, Use]) -> StagePlan:
    """Phases given by what they need beyond what all roles hold."""
    held = total(role.held for role in roles)
    return StagePlan(stage, tuple(roles), tuple(Phase(name, held + use) for name, use in phases.items()))


def step(roles: list[Role]) -> Use:
    """The optimiser step of ``roles`` together: all their gradients, and what DeepSpeed makes of them."""
    used = [Use(gradients=role.gradients, other=role.state.at_step if role.state else 0) for role in roles]
    return total(used)


def most(roles: list[Role]) -> Use:
    """What the neediest of ``roles`` needs to run; they run one after the other."""
    return peak([Use(), *(role.running(whole=False) for role in roles)])

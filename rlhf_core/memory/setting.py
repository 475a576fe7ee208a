"""Everything that an estimate depends on, and what a phase of a stage was estimated to need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_core.config.loading.load import Params
from rlhf_core.config.lora import LoraConfig
from rlhf_core.memory.lengths import Lengths
from rlhf_core.memory.placement import Placement, placement_of
from rlhf_core.memory.roles import Role, frozen, trained, trained_on_shared, with_trained_head
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.usage import Use, total


@dataclass(frozen=True)
class Recipe:
    """Settings, the starting model's shape, and the lengths of sequences. ``root``: where relative files start."""

    params: Params
    shape: Shape
    lengths: Lengths
    root: Path

    def setting(self, stage: str) -> Setting:
        """The recipe as one stage sees it."""
        placement = placement_of(self.params, stage, self.root)
        return Setting(self.params, self.shape, self.lengths, placement, self.root)


@dataclass(frozen=True)
class Setting:
    """A recipe with the placement of one stage's job."""

    params: Params
    shape: Shape
    lengths: Lengths
    placement: Placement
    root: Path

    def trained(self, name: str, parameters: int, lora: LoraConfig | None = None) -> Role:
        """A trained model of the setting's shape."""
        return trained(name, parameters, self.shape, self.placement, lora)

    def with_trained_head(self, name: str, parameters: int) -> Role:
        """A scalar model of which only the head is trained."""
        return with_trained_head(name, parameters, self.shape, self.placement)

    def frozen(self, name: str, parameters: int) -> Role:
        """A frozen model, where the launch settings put those."""
        return frozen(name, parameters, self.placement)

    def scalar(self, name: str) -> Role:
        """The reward model or referee: a frozen model, or adapters and a head on the policy's weights."""
        config = self.params.reward if name == "reward" else self.params.referee
        if not self.params.ppo.share_base or config.lora is None:
            return self.frozen(name, self.shape.scalar)
        own = self.shape.adapters(config.lora.rank, config.lora.targets) + self.shape.hidden
        return self.fixed(name, own)

    def critic(self) -> Role:
        """PPO's own critic: a model, or the adapters and the head that it was pre-trained as, on the policy's weights.

        Those on the reward model come with that one's, on whatever layers either has them.
        """
        ppo, critic, reward = self.params.ppo, self.params.critic, self.params.reward
        if not ppo.share_base or critic.lora is None:
            return self.trained("critic", self.shape.scalar, ppo.critic_lora)
        rank, targets = critic.lora.rank, set(critic.lora.targets)
        if critic.init == "reward" and reward.lora is not None:
            rank += reward.lora.rank
            targets = targets | set(reward.lora.targets) if targets and reward.lora.targets else set()
        return trained_on_shared("critic", rank, targets, self.shape, self.placement)

    def fixed(self, name: str, parameters: int) -> Role:
        """A frozen model that stays on the device whatever the launch settings say."""
        return frozen(name, parameters, replace(self.placement, frozen="device"))


@dataclass(frozen=True)
class Phase:
    """``use`` at the phase's peak, everything that the stage holds meanwhile included."""

    name: str
    use: Use


@dataclass(frozen=True)
class StagePlan:
    """One stage on one GPU."""

    stage: str
    placement: Placement
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


def stage_plan(stage: str, setting: Setting, roles: list[Role], phases: dict[str, Use], loading: Use) -> StagePlan:
    """Phases given by what they need beyond what all roles hold; ``loading`` comes before that and stands alone."""
    held = total(role.held for role in roles)
    during = [Phase(name, held + use) for name, use in phases.items()]
    return StagePlan(stage, setting.placement, tuple(roles), (Phase("loading", loading), *during))


def step(roles: Sequence[Role]) -> Use:
    """The optimiser step of ``roles`` together: all their gradients, and what DeepSpeed makes of them."""
    return total(Use(gradients=role.gradients, other=role.state.at_step if role.state else 0) for role in roles)


def whole(*roles: Role) -> Use:
    """Models as they are loaded, before they are sharded or moved away."""
    return Use(weights=sum(role.whole for role in roles))

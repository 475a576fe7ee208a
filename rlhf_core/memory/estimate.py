"""The memory estimate: what it depends on, the models of a stage, and what a stage and a whole recipe need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.loading import Params, check_params, overridden
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.reward_sources import OWN_MODEL, ClassifierSource, EnsembleSource, ModelSource, source_names
from rlhf_core.errors import ModelError
from rlhf_core.memory.architecture import Architecture, architecture_of_file
from rlhf_core.memory.dry_run import Head, MemoryUse, ModelVariant, Moments, largest, model_size
from rlhf_core.memory.sequence_lengths import BatchShape, SequenceLengths
from rlhf_core.memory.sharding import (
    GIB,
    ModelFootprint,
    ParallelLayout,
    frozen_footprint,
    trained_footprint,
    usable_memory,
)
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.threads import KEPT_AT_THE_END


@dataclass(frozen=True)
class ModelRole:
    """One model of a stage, such as ``policy``: as it is built, and what it takes of each GPU."""

    name: str
    variant: ModelVariant
    footprint: ModelFootprint

    def peak_of_update(self, moments: Moments) -> MemoryUse:
        """The heaviest moment of a training pass, with its gradients as they are kept and its weights gathered."""
        kept = self.footprint.gradients_kept
        peak = largest(replace(moment, gradients=round(kept * moment.gradients)) for moment in moments)
        return peak + MemoryUse(weights=self.footprint.running)


@dataclass(frozen=True)
class EstimateInputs:
    """Settings, the starting model and the lengths of sequences. Relative files of the settings start at ``root``."""

    params: Params
    architecture: Architecture
    lengths: SequenceLengths
    root: Path

    def with_changes(self, changes: Mapping[str, Any]) -> EstimateInputs:
        """The same with each ``section.key`` of ``changes``; ``ConfigError`` when the result contradicts itself."""
        document = self.params.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return replace(self, params=check_params(overridden(document, changes), "parameters"))


@dataclass(frozen=True)
class StageInputs(EstimateInputs):
    """The same with the layout of one stage's job, which the stage's models are built for."""

    layout: ParallelLayout

    @property
    def sampling(self) -> Sampling:
        """PPO's training distribution, with replies that never end before their limit.

        One forbidden token stands for the special ones: what matters to memory is that some are masked.
        """
        ppo = self.params.ppo
        return Sampling(-1, 0, ppo.max_new_tokens, ppo.temperature, ppo.min_new_tokens, forbidden_ids=(0,))

    def rollout_batch(self, rows: int) -> BatchShape:
        """Rows of the longest prompt and a full-length reply."""
        return BatchShape(rows, self.lengths.prompt + self.params.ppo.max_new_tokens)

    def variant(self, head: Head, layers: int | None = None) -> ModelVariant:
        """A model of the starting architecture, or of its lowest ``layers``, that is not trained."""
        return ModelVariant(self.architecture.lower(layers), head, self.layout.precision)

    def trained(
        self,
        name: str,
        head: Head,
        lora: LoraConfig | None = None,
        owns_backbone: bool = True,
        layers: int | None = None,
    ) -> ModelRole:
        """A model whose weights are trained, or with ``lora`` its adapters and scalar head."""
        variant = replace(
            self.variant(head, layers),
            trained="weights" if lora is None else "adapters",
            lora=lora,
            gradient_checkpointing=self.layout.gradient_checkpointing,
        )
        packed = owns_backbone and lora is not None and lora.quantize is not None
        return ModelRole(name, variant, trained_footprint(model_size(variant), self.layout, packed, owns_backbone))

    def frozen(self, name: str, head: Head, layers: int | None = None, *, on_device: bool = False) -> ModelRole:
        """A frozen model where the launch settings put those, or on the device whatever they say."""
        variant, layout = (
            self.variant(head, layers),
            replace(self.layout, frozen="device") if on_device else self.layout,
        )
        return ModelRole(name, variant, frozen_footprint(model_size(variant).parameters, layout))

    def frozen_scalar(self, name: Literal["reward", "referee"]) -> ModelRole:
        """The reward model or referee in PPO: a frozen model, or adapters and a head on the policy's weights."""
        config = self.params.reward if name == "reward" else self.params.referee
        if not self.params.ppo.share_base or config.lora is None:
            return self.frozen(name, "scalar", config.layers)
        adapters = self.trained(name, "scalar", config.lora, owns_backbone=False, layers=config.layers)
        own, layout = adapters.footprint, replace(self.layout, frozen="device")
        return replace(adapters, footprint=frozen_footprint(own.parameters, layout, own.whole))

    def ppo_critic(self) -> ModelRole:
        """PPO's own critic: a model, or the adapters and the head that it was pre-trained as, on the policy's weights.

        Those on the reward model come with that one's, on whatever layers either has them (models/shared_base.py).
        """
        ppo, lora, reward = self.params.ppo, self.params.critic.lora, self.params.reward.lora
        if not ppo.share_base or lora is None:
            return self.trained("critic", "scalar", ppo.critic_lora, layers=self.critic_layers)
        if self.params.critic.init == "reward" and reward is not None:
            lora = reward.stacked_with(lora)
        return self.trained("critic", "scalar", lora, owns_backbone=False, layers=self.critic_layers)

    @property
    def critic_layers(self) -> int | None:
        """Layers of a critic of its own: as many as the reward model has where it starts from that."""
        return self.params.reward.layers if self.params.critic.init == "reward" else None

    def reward_models(self) -> list[ModelRole]:
        """Frozen models that ``ppo.reward.sources`` name. Functions and servers hold none here, and the size of a
        classifier on the hub is not known."""
        sources = self.params.ppo.reward.sources
        roles = []
        for name, source in zip(source_names(sources), sources, strict=True):
            match source:
                case ModelSource(path=path):
                    roles.append(self._scorer("reward" if path == OWN_MODEL else name, path))
                case EnsembleSource(paths=paths):
                    roles += [self._scorer(f"{name} {number}", path) for number, path in enumerate(paths, 1)]
                case ClassifierSource(model=path) if (self.root / path).is_dir():
                    roles.append(self._scorer(name, path))
        return roles

    def _scorer(self, name: str, path: str) -> ModelRole:
        """The model in a folder, or before it is there one of the starting model's sizes, which a model of a kind that
        cannot be built here has too."""
        file = self.root / path / "config.json"
        if path != OWN_MODEL and file.is_file():
            with suppress(ModelError):
                return replace(self, architecture=architecture_of_file(file)).frozen(name, "scalar")
        return self.frozen(name, "scalar", self.params.reward.layers if path == OWN_MODEL else None)


# Of a stage's process on a CPU beside its tensors: Python and the libraries once all are imported. See docs/plan.md.
PROCESS_BASE = 600 << 20
# An allowance for what a process in bfloat16 holds beyond that and beyond tensors: stages of SmolLM2-135M held 0.7 to
# 1.1 GiB more than was planned without it. Its cause is not established; see docs/plan.md.
BFLOAT16_ALLOWANCE = 896 << 20


@dataclass(frozen=True)
class StageEstimate:
    """One stage on one GPU: at the peak of each phase, all that the stage holds meanwhile included."""

    stage: str
    layout: ParallelLayout
    roles: tuple[ModelRole, ...]
    phases: Mapping[str, MemoryUse]

    @property
    def worst_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the worst moment."""
        return self.phases[self.worst_phase].total

    @property
    def host(self) -> int:
        """Bytes of host memory for offloaded models and optimiser state, for each GPU."""
        return sum(role.footprint.host for role in self.roles)

    @property
    def freed(self) -> int:
        """Bytes of freed tensors that the allocator keeps: as much as it is told to, and at most what there was."""
        return min(KEPT_AT_THE_END, self.peak)

    @property
    def allowance(self) -> int:
        """Bytes that processes in bfloat16 held beyond all that is accounted for; those in float32 held none."""
        return BFLOAT16_ALLOWANCE if self.layout.precision == "bfloat16" else 0

    @property
    def process(self) -> int | None:
        """Bytes of the whole process where it runs on a CPU; None of a stage of several processes, or of DeepSpeed."""
        if self.layout.engine != "local" or self.layout.gpus > 1:
            return None
        return PROCESS_BASE + self.peak + self.freed + self.allowance + self.host


@dataclass(frozen=True)
class MemoryEstimate:
    """All stages that were asked for, and the inputs of their estimate."""

    inputs: EstimateInputs
    stages: tuple[StageEstimate, ...]

    @property
    def limit(self) -> int | None:
        """Bytes that tensors may take of one GPU; None where ``plan.gpu_memory_gb`` is not set."""
        memory = self.inputs.params.plan.gpu_memory_gb
        return usable_memory(memory) if memory is not None else None

    def sampler_share(self, stage: StageEstimate) -> float | None:
        """The share of its GPU that ``stage`` leaves to a vLLM server beside it; None where there is no such server, or
        the GPU's memory is unknown. A server that sleeps meanwhile needs no room at the stage's peak."""
        params = self.inputs.params
        sampler = params.evaluate.sampler if stage.stage == "evaluate" else params.ppo.sampler
        if self.limit is None or "generation" not in stage.phases or sampler.kind == "local":
            return None
        beside = stage.phases["generation"].total if sampler.sleep else stage.peak
        return max(self.limit - beside, 0) / (params.plan.gpu_memory_gb or math.inf) / GIB

    @property
    def worst(self) -> StageEstimate:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Bytes of tensors on one GPU at the worst moment of all stages."""
        return self.worst.peak

    @property
    def fits(self) -> bool:
        """Whether the peak keeps the limit; true where none is known."""
        return self.limit is None or self.peak <= self.limit


def optimizer_step(*roles: ModelRole) -> MemoryUse:
    """The optimiser step of ``roles`` together: all their gradients, and what DeepSpeed makes of them."""
    footprints = [role.footprint for role in roles]
    return MemoryUse(gradients=sum(one.gradients for one in footprints), other=sum(one.at_step for one in footprints))


def held(roles: Iterable[ModelRole]) -> MemoryUse:
    """What models always hold."""
    return sum((role.footprint.held for role in roles), MemoryUse())


def at_work(*roles: ModelRole) -> MemoryUse:
    """Weights that rollouts, selection and evaluation need on top."""
    return MemoryUse(weights=sum(role.footprint.sampling for role in roles))


def whole(*roles: ModelRole) -> MemoryUse:
    """Models as they are loaded, before they are sharded or moved away."""
    return MemoryUse(weights=sum(role.footprint.whole for role in roles))


def gathered_by_one(roles: Iterable[ModelRole]) -> MemoryUse:
    """What the neediest frozen model gathers; they run one after the other."""
    return MemoryUse(weights=max((role.footprint.running for role in roles), default=0))

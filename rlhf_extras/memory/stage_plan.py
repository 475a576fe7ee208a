"""The memory plan of one stage: its models, what each takes of a GPU, and its phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.loading import check_params
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import overridden
from rlhf_core.config.reward_sources import (
    OWN_MODEL,
    ClassifierSource,
    EnsembleSource,
    ModelSource,
    source_names,
)
from rlhf_core.errors import ModelError
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.threads import KEPT_AT_THE_END
from rlhf_extras.memory.architecture import Architecture, architecture_of_file
from rlhf_extras.memory.dry_run import (
    Head,
    MemoryUse,
    ModelVariant,
    Moments,
    largest,
    model_size,
    together,
)
from rlhf_extras.memory.sequence_lengths import BatchShape, SequenceLengths
from rlhf_extras.memory.sharding import (
    GIB,
    ModelFootprint,
    ParallelLayout,
    frozen_footprint,
    trained_footprint,
    usable_memory,
)
from rlhf_extras.sampling.settings import VllmSamplerConfig

# Of a stage's process on a CPU beside its tensors: Python and the libraries once all are imported.
# See docs/plan.md.
PROCESS_BASE = 600 << 20


# An allowance for what a process in bfloat16 holds beyond that and beyond tensors: stages of
# SmolLM2-135M held 0.7 to 1.1 GiB more than was planned without it. Its cause is not established;
# see docs/plan.md.
BFLOAT16_ALLOWANCE = 896 << 20


@dataclass(frozen=True)
class EstimateInputs:
    """Settings, the starting model and the lengths of sequences. Relative files of the settings
    start at ``root``.

    ``memory`` are the bytes that this machine has for a process, or that its GPU has, where a plan
    is measured by them; a GPU that settings name goes before.
    """

    params: Params
    architecture: Architecture
    lengths: SequenceLengths
    root: Path
    memory: int | None = None

    @property
    def limit(self) -> int | None:
        """Bytes that tensors may take of one GPU; None where ``plan.gpu_memory_gb`` is not set."""
        memory = self.params.plan.gpu_memory_gb
        return usable_memory(memory) if memory is not None else None

    def with_changes(self, changes: Mapping[str, Any]) -> EstimateInputs:
        """The same with each ``section.key`` of ``changes``; ``ConfigError`` when the result
        contradicts itself.
        """
        document = self.params.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return replace(self, params=check_params(overridden(document, changes), "parameters"))


@dataclass(frozen=True, kw_only=True)
class ModelRole(ModelFootprint):
    """One model of a stage, such as ``policy``: as it is built, and what it takes of each GPU."""

    name: str
    variant: ModelVariant

    def peak_of_update(self, moments: Moments) -> MemoryUse:
        """The heaviest moment of a training pass, with its gradients as they are kept and its
        weights gathered.
        """
        kept = self.gradients_kept
        return (
            largest(replace(one, gradients=round(kept * one.gradients)) for one in moments)
            + self.running
        )


@dataclass
class StagePlan:
    """One stage on one GPU, filled in by the function of this module that knows the stage.

    Attributes:
        inputs: What it depends on.
        stage: Its name.
        layout: How its job spreads its models.
        roles: Its models.
        phases: All that is alive at the peak of each phase.
        rows: How many rows are sampled or go through a training pass together, by the setting that
            bounds them.
    """

    inputs: EstimateInputs
    stage: str
    layout: ParallelLayout
    roles: Sequence[ModelRole] = ()
    phases: dict[str, MemoryUse] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def worst_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the worst moment."""
        return self.phases[self.worst_phase].total

    @property
    def limit(self) -> int | None:
        """Bytes that its tensors may take: of the GPU that settings name, else of what this machine
        has; None where neither is known.
        """
        memory = self.inputs.memory
        if self.inputs.limit is not None or memory is None:
            return self.inputs.limit
        if self.process is None:
            return usable_memory(memory / GIB)
        beside_tensors = self.process - self.peak
        return max(memory - beside_tensors, 0)

    @property
    def needed(self) -> int:
        """Bytes of its process on a CPU, or of its tensors on a GPU."""
        return self.peak if self.process is None else self.process

    @property
    def fits(self) -> bool:
        """Whether the peak keeps the limit; true where none is known."""
        return self.limit is None or self.peak <= self.limit

    @property
    def host(self) -> int:
        """Bytes of host memory for offloaded models and optimiser state, for each GPU."""
        return sum(role.host for role in self.roles)

    @property
    def on_gpu(self) -> bool:
        """Whether it is for a GPU: one of known memory, one of several or of DeepSpeed's, or that
        of this machine.
        """
        single = self.layout.engine == "local" and self.layout.gpus == 1
        return self.inputs.limit is not None or not single or distributed.device().type == "cuda"

    @property
    def process_parts(self) -> dict[str, int]:
        """Bytes that its process holds on a CPU beside tensors; none of a plan for a GPU."""
        if self.on_gpu:
            return {}
        # The allocator keeps as much of freed tensors as it is told to, and at most what there was.
        parts = {"libraries": PROCESS_BASE, "freed memory kept": min(KEPT_AT_THE_END, self.peak)}
        return parts | (
            {"bfloat16 allowance": BFLOAT16_ALLOWANCE}
            if self.layout.precision == "bfloat16"
            else {}
        )

    @property
    def process(self) -> int | None:
        """Bytes of the whole process where it runs on a CPU; None of a plan for a GPU."""
        parts = self.process_parts
        return self.peak + self.host + sum(parts.values()) if parts else None

    @property
    def sampler_share(self) -> float | None:
        """The share of its GPU that the stage leaves to a vLLM server that it starts; None where it
        starts none, or the GPU's memory is unknown. A server that sleeps meanwhile needs no room at
        the stage's peak."""
        params, limit = self.inputs.params, self.inputs.limit
        sampler = params.evaluate.sampler if self.stage == "evaluate" else params.ppo.sampler
        if (
            limit is None
            or "generation" not in self.phases
            or not isinstance(sampler, VllmSamplerConfig)
            or sampler.url is not None
        ):
            return None
        beside = self.phases["generation"].total if sampler.sleep else self.peak
        return max(limit - beside, 0) / (params.plan.gpu_memory_gb or math.inf) / GIB

    def begin(self, roles: Sequence[ModelRole], loading: MemoryUse) -> None:
        """Say which models the stage has throughout, and what their loading takes before that."""
        self.roles = roles
        self.phases["loading"] = loading

    def add(self, phase: str, *uses: MemoryUse) -> None:
        """Add a phase by what it needs beyond what the stage's models always hold."""
        self.phases[phase] = together([*(role.held for role in self.roles), *uses])

    def bounded(self, setting: str, rows: int) -> int:
        """Note that ``setting`` bounds a pass of ``rows``, and return them."""
        self.rows[setting] = max(rows, self.rows.get(setting, 0))
        return rows

    @property
    def sampling(self) -> Sampling:
        """PPO's training distribution, with replies that never end before their limit.

        One forbidden token stands for the special ones: what matters to memory is that some are
        masked.
        """
        ppo = self.inputs.params.ppo
        return Sampling(
            -1, 0, ppo.max_new_tokens, ppo.temperature, ppo.min_new_tokens, forbidden_ids=(0,)
        )

    def rollout_batch(self, rows: int) -> BatchShape:
        """Rows of the longest prompt and a full-length reply."""
        return BatchShape(rows, self.inputs.lengths.prompt + self.inputs.params.ppo.max_new_tokens)

    def variant(self, head: Head, layers: int | None = None) -> ModelVariant:
        """A model of the starting architecture, or of its lowest ``layers``, that is not
        trained.
        """
        return ModelVariant(
            self.inputs.architecture.lower(layers), head, self.layout.precision, on_gpu=self.on_gpu
        )

    def trained(
        self,
        name: str,
        variant: ModelVariant,
        lora: LoraConfig | None = None,
        owns_backbone: bool = True,
    ) -> ModelRole:
        """A model whose weights are trained, or with ``lora`` its adapters and scalar head."""
        trained: Literal["weights", "adapters"] = "weights" if lora is None else "adapters"
        checkpointing = self.layout.gradient_checkpointing
        variant = replace(variant, trained=trained, lora=lora, gradient_checkpointing=checkpointing)
        packed = owns_backbone and lora is not None and lora.quantize is not None
        footprint = trained_footprint(model_size(variant), self.layout, packed, owns_backbone)
        return ModelRole(name=name, variant=variant, **vars(footprint))

    def frozen(self, name: str, variant: ModelVariant, *, on_device: bool = False) -> ModelRole:
        """A frozen model where the launch settings put those, or on the device whatever they
        say.
        """
        layout = replace(self.layout, frozen="device") if on_device else self.layout
        return ModelRole(
            name=name,
            variant=variant,
            **vars(frozen_footprint(model_size(variant).parameters, layout)),
        )

    def judging(self, name: Literal["reward", "referee"]) -> ModelRole:
        """The reward model or referee in PPO: a frozen model, or adapters and a head on the
        policy's weights.
        """
        config = self.inputs.params.reward if name == "reward" else self.inputs.params.referee
        variant = self.variant("scalar", config.layers)
        if not self.inputs.params.ppo.share_base or config.lora is None:
            return self.frozen(name, variant)
        adapters = self.trained(name, variant, config.lora, owns_backbone=False)
        layout = replace(self.layout, frozen="device")
        return replace(
            adapters, **vars(frozen_footprint(adapters.parameters, layout, adapters.whole.weights))
        )

    def critic(self, lora: LoraConfig | None, owns_backbone: bool = True) -> ModelRole:
        """A critic, of as many layers as the reward model has where it starts from that."""
        layers = (
            self.inputs.params.reward.layers if self.inputs.params.critic.init == "reward" else None
        )
        return self.trained("critic", self.variant("scalar", layers), lora, owns_backbone)

    def ppo_critic(self) -> ModelRole:
        """PPO's own critic: a model, or the adapters and the head that it was pre-trained as, on
        the policy's weights.

        Those on the reward model come with that one's, on whatever layers either has them
        (models/shared_base.py).
        """
        params = self.inputs.params
        lora, reward = params.critic.lora, params.reward.lora
        if not params.ppo.share_base or lora is None:
            return self.critic(params.ppo.critic_lora)
        if params.critic.init == "reward" and reward is not None:
            lora = reward.stacked_with(lora)
        return self.critic(lora, owns_backbone=False)

    def reward_models(self) -> list[ModelRole]:
        """Frozen models that ``ppo.reward.sources`` name. Functions and servers hold none here, and
        the size of a classifier on the hub is not known."""
        sources = self.inputs.params.ppo.reward.sources
        found: list[tuple[str, str, bool]] = []
        for name, source in zip(source_names(sources), sources, strict=True):
            match source:
                case ModelSource(path=path):
                    found.append(("reward" if path == OWN_MODEL else name, path, False))
                case EnsembleSource(paths=paths):
                    found += [
                        (f"{name} {number}", path, False) for number, path in enumerate(paths, 1)
                    ]
                case ClassifierSource(model=path) if (self.inputs.root / path).is_dir():
                    found.append((name, path, True))
        return [
            self.frozen(name, self._scorer(path), on_device=whole) for name, path, whole in found
        ]

    def _scorer(self, path: str) -> ModelVariant:
        """The model in a folder, or before it is there one of the starting model's sizes, which a
        model of a kind that cannot be built here has too."""
        file = self.inputs.root / path / "config.json"
        if path == OWN_MODEL:
            return self.variant("scalar", self.inputs.params.reward.layers)
        if file.is_file():
            with suppress(ModelError):
                return replace(self.variant("scalar"), architecture=architecture_of_file(file))
        return self.variant("scalar")

"""What to change when a stage does not fit: settings tried one after another, those that cost least first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.loading.load import Params
from rlhf_core.errors import ConfigError
from rlhf_core.memory.estimate import EstimateInputs, MemoryEstimate
from rlhf_core.memory.sharding import launch_of
from rlhf_core.memory.stages import StageEstimate
from rlhf_core.sampling.token_scoring import MICRO_BATCH

# A change that takes away less than this share of a phase's peak is not worth advising.
WORTHWHILE = 0.02
LORA_RANK = 16
ADAPTERS = {
    "reward": ("reward.lora",),
    "referee": ("referee.lora",),
    "critic": ("critic.lora",),
    "ppo": ("ppo.policy_lora", "ppo.critic_lora"),
}
Changes = dict[str, Any]


@dataclass(frozen=True)
class AdviceStep:
    """``changes`` are settings by path, and ``after`` the stage with them and those of every step before."""

    changes: Changes
    after: StageEstimate

    @property
    def assignments(self) -> str:
        """As ``--set`` takes them."""
        return " ".join(
            f"{path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in self.changes.items()
        )


@dataclass(frozen=True)
class MemoryAdvice:
    """What to change for one stage. ``fits``: it does after the last step."""

    stage: str
    steps: tuple[AdviceStep, ...]
    fits: bool


def advise(estimate: MemoryEstimate) -> tuple[MemoryAdvice, ...]:
    """For every stage that does not fit, the settings that make it fit, or come nearest.

    Smaller batches of sampling and of passes change no result; gradient checkpointing costs time; sharding and
    offloading cost communication; smaller optimiser steps and adapters change what is learned and come last. A change
    that turns out not to lower the peak, or not to be needed, is left out again, dear ones first.
    """
    limit = estimate.limit
    if limit is None:
        return ()
    too_large = [stage for stage in estimate.stages if stage.peak.use.total > limit]
    return tuple(_advise_stage(estimate.inputs, stage, limit) for stage in too_large)


def _advise_stage(inputs: EstimateInputs, stage: StageEstimate, limit: int) -> MemoryAdvice:
    taken: list[Changes] = []
    current, before = inputs, stage
    for candidates in CANDIDATES:
        while before.peak.use.total > limit:
            helpful = _first_that_helps(current, before, limit, candidates(current.params, before))
            if helpful is None:
                break
            taken.append(helpful.changes)
            current, before = current.with_changes(helpful.changes), helpful.after
    reached = before.peak.use.total
    needed = _needed(inputs, stage.stage, max(limit, reached), taken)
    return MemoryAdvice(stage.stage, _steps(inputs, stage.stage, needed), reached <= limit)


def _first_that_helps(
    inputs: EstimateInputs, before: StageEstimate, limit: int, candidates: Iterator[Changes]
) -> AdviceStep | None:
    """The first change after which a phase that is too large is smaller, and none of those larger."""
    for changes in candidates:
        try:
            after = inputs.with_changes(changes).estimate(before.stage)
        except ConfigError:
            continue  # it contradicts other settings
        uses = {phase.name: phase.use.total for phase in after.phases}
        pairs = [(phase.use.total, uses.get(phase.name, 0)) for phase in before.phases if phase.use.total > limit]
        if any(new <= old * (1 - WORTHWHILE) for old, new in pairs) and all(new <= old for old, new in pairs):
            return AdviceStep(changes, after)
    return None


def _needed(inputs: EstimateInputs, stage: str, goal: int, taken: Sequence[Changes]) -> list[Changes]:
    """``taken`` without what the peak stays within ``goal`` without. Of repeated changes to the same settings the last
    one stands."""
    kept = list({tuple(changes): changes for changes in taken}.values())
    for changes in reversed(kept):
        rest = [other for other in kept if other is not changes]
        try:
            steps = _steps(inputs, stage, rest)
            after = steps[-1].after if steps else inputs.estimate(stage)
        except ConfigError:
            continue
        if after.peak.use.total <= goal:
            kept = rest
    return kept


def _steps(inputs: EstimateInputs, stage: str, taken: Sequence[Changes]) -> tuple[AdviceStep, ...]:
    steps = []
    for changes in taken:
        inputs = inputs.with_changes(changes)
        steps.append(AdviceStep(changes, inputs.estimate(stage)))
    return tuple(steps)


def _fewer_together(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Half as many replies sampled at once, where nothing but memory depends on it."""
    ppo, share = params.ppo, before.layout.share
    if before.stage == "ppo":
        yield from _half("ppo.selection.batch_size", min(ppo.selection.batch_size, share(ppo.selection.prompts)))
    if before.stage in ("critic", "ppo"):
        rows = share(params.critic.batch_size if before.stage == "critic" else ppo.batch_size)
        yield from _half("ppo.sampling_batch_size", min(ppo.sampling_batch_size or rows, rows))
    if before.stage == "evaluate":
        yield from _half("evaluate.batch_size", min(params.evaluate.batch_size, params.evaluate.prompts))


def _smaller_micro_batches(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Half as many sequences in one pass."""
    if before.stage == "sft":
        rows = before.layout.share(params.sft.batch_size)
        yield from _half("sft.micro_batch_size", min(params.sft.micro_batch_size or rows, rows))
    elif before.stage in ("critic", "ppo"):
        ppo = params.ppo
        rows = before.layout.share(max(ppo.batch_size // ppo.minibatches, ppo.ptx.batch_size))
        unset = max(MICRO_BATCH, ppo.ptx.batch_size)
        yield from _half("ppo.micro_batch_size", min(ppo.micro_batch_size or unset, rows))


def _checkpointing(params: Params, before: StageEstimate) -> Iterator[Changes]:
    if before.stage != "evaluate" and not before.layout.gradient_checkpointing:
        yield {f"compute.launch.{before.stage}.gradient_checkpointing": True}


def _sharding(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Training state first, then frozen models: what costs least communication."""
    layout = before.layout
    if before.stage == "evaluate" or layout.gpus == 1 or launch_of(params, before.stage).deepspeed is not None:
        return
    for zero in range(layout.zero + 1, 3):
        yield _deepspeed(before, zero=zero)
    if before.stage in ("critic", "ppo") and layout.frozen == "device":
        yield _deepspeed(before, zero=max(layout.zero, 1), frozen="sharded")


def _frozen_offloaded(params: Params, before: StageEstimate) -> Iterator[Changes]:
    if before.stage in ("critic", "ppo") and before.layout.frozen != "offload":
        yield {f"compute.launch.{before.stage}.frozen": "offload"}


def _offloading(params: Params, before: StageEstimate) -> Iterator[Changes]:
    layout = before.layout
    if before.stage == "evaluate" or launch_of(params, before.stage).deepspeed is not None:
        return
    if layout.gpus > 1 and layout.zero < 3:
        yield _deepspeed(before, zero=3)
    if not layout.offload_optimizer:
        yield _deepspeed(before, zero=max(layout.zero, 2), offload="optimizer")
    if not layout.offload_parameters:
        yield _deepspeed(before, zero=3, offload="parameters")


def _bfloat16(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Only where float32 copies are kept of what is trained: plain torch would lose small steps."""
    if params.base.dtype == "float32" and (before.stage == "evaluate" or before.layout.zero > 0):
        yield {"base.dtype": "bfloat16"}


def _token_budget(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Fewer pairs in a step: another batch size."""
    if before.stage in ("reward", "referee"):
        yield from _half(f"{before.stage}.batch.token_budget", getattr(params, before.stage).batch.token_budget)


def _lora(params: Params, before: StageEstimate) -> Iterator[Changes]:
    sections = [path.split(".") for path in ADAPTERS.get(before.stage, ())]
    changes = {
        f"{section}.{name}.rank": LORA_RANK
        for section, name in sections
        if getattr(getattr(params, section), name) is None
    }
    if changes:
        yield changes


CANDIDATES: tuple[Callable[[Params, StageEstimate], Iterator[Changes]], ...] = (
    _fewer_together,
    _smaller_micro_batches,
    _checkpointing,
    _sharding,
    _frozen_offloaded,
    _bfloat16,
    _offloading,
    _token_budget,
    _lora,
)


def _half(path: str, value: int) -> Iterator[Changes]:
    if value > 1:
        yield {path: value // 2}


def _deepspeed(before: StageEstimate, **changes: Any) -> Changes:
    settings = {"engine": "deepspeed", **changes}
    return {f"compute.launch.{before.stage}.{name}": value for name, value in settings.items()}

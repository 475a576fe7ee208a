"""What to change when a stage does not fit: settings tried one after another, those that cost least first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.loading import Params
from rlhf_core.errors import RlhfError
from rlhf_core.memory.estimate import EstimateInputs, MemoryEstimate, StageEstimate
from rlhf_core.memory.sharding import launch_of, planned_precision
from rlhf_core.memory.stages import estimate_stage
from rlhf_core.ppo.rejection_sampling import PROMPTS_AT_ONCE
from rlhf_core.sampling.token_scoring import MICRO_BATCH

# A change that takes away less than this share of a phase's peak is not worth advising.
WORTHWHILE = 0.02
LORA_RANK = 16
ADAPTERS = {
    "reward": ("reward.lora",),
    "referee": ("referee.lora",),
    "judge": ("judge.lora",),
    "critic": ("critic.lora",),
    "ppo": ("ppo.policy_lora", "ppo.critic_lora"),
}
Changes = dict[str, Any]


def adapter_settings(params: Params, stage: str) -> tuple[str, ...]:
    """Paths of the settings of a stage's adapters; a critic has some only where there is one."""
    paths = ADAPTERS.get(stage, ())
    without_critic = params.ppo.advantage.critic_free or params.policy.method != "ppo"
    return tuple(path for path in paths if not (path == "ppo.critic_lora" and without_critic))


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
    that turns out not to lower the peak, or not to be needed, is left out again, dear ones first. What is claimed is
    computed from the very list that is returned.
    """
    limit = estimate.limit
    if limit is None:
        return ()
    too_large = [stage for stage in estimate.stages if stage.peak.use.total > limit]
    return tuple(_advise_stage(estimate.inputs, stage, limit) for stage in too_large)


def _advise_stage(inputs: EstimateInputs, stage: StageEstimate, limit: int) -> MemoryAdvice:
    taken: list[Changes] = []
    current, before = inputs, stage
    for kind in range(len(_candidates(inputs.params, stage))):
        while before.peak.use.total > limit:
            helpful = _first_that_helps(current, before, limit, _candidates(current.params, before)[kind])
            if helpful is None:
                break
            taken.append(helpful.changes)
            current, before = current.with_changes(helpful.changes), helpful.after
    # Settings that were changed more than once stand with their last value wherever they are listed.
    final = {path: value for changes in taken for path, value in changes.items()}
    kept = [{path: final[path] for path in paths} for paths in dict.fromkeys(tuple(changes) for changes in taken)]
    goal = max(limit, before.peak.use.total)
    for changes in reversed(kept):
        rest = [other for other in kept if other is not changes]
        after = _steps(inputs, stage.stage, rest)
        if after is not None and (after[-1].after if after else stage).peak.use.total <= goal:
            kept = rest
    steps = _steps(inputs, stage.stage, kept) or ()
    return MemoryAdvice(stage.stage, steps, (steps[-1].after if steps else stage).peak.use.total <= limit)


def _first_that_helps(
    inputs: EstimateInputs, before: StageEstimate, limit: int, candidates: Sequence[Changes]
) -> AdviceStep | None:
    """The first change after which a phase that is too large is smaller, and none of those larger."""
    for changes in candidates:
        steps = _steps(inputs, before.stage, [changes])
        if steps is None:
            continue
        uses = {phase.name: phase.use.total for phase in steps[0].after.phases}
        pairs = [(phase.use.total, uses.get(phase.name, 0)) for phase in before.phases if phase.use.total > limit]
        if any(new <= old * (1 - WORTHWHILE) for old, new in pairs) and all(new <= old for old, new in pairs):
            return steps[0]
    return None


def _steps(inputs: EstimateInputs, stage: str, taken: Sequence[Changes]) -> tuple[AdviceStep, ...] | None:
    """The stage after each of ``taken``; None where one contradicts other settings, or needs a missing package."""
    steps = []
    try:
        for changes in taken:
            inputs = inputs.with_changes(changes)
            steps.append(AdviceStep(changes, estimate_stage(inputs, stage)))
    except RlhfError:
        return None
    return tuple(steps)


def _candidates(params: Params, before: StageEstimate) -> tuple[list[Changes], ...]:
    """Changes that may save memory, by what they do; those that cost least come first."""
    stage, layout = before.stage, before.layout
    launch, trains = f"compute.launch.{stage}", stage != "evaluate"
    rolls_out = _rolls_out(params, stage)
    shardable = trains and launch_of(params, stage).deepspeed is None
    fewer_replies, micro_batches, fewer_pairs = _smaller_batches(params, before)
    sharding: list[Changes] = []
    offloading: list[Changes] = []
    if shardable and layout.gpus > 1:
        # Training state is sharded before frozen models: that costs less communication.
        sharding += [_deepspeed(launch, zero=zero) for zero in range(layout.zero + 1, 3)]
        if rolls_out and layout.frozen == "device":
            sharding.append(_deepspeed(launch, zero=max(layout.zero, 1), frozen="sharded"))
        if layout.zero < 3:
            offloading.append(_deepspeed(launch, zero=3))
    if shardable and not layout.offload_optimizer:
        offloading.append(_deepspeed(launch, zero=max(layout.zero, 2), offload="optimizer"))
    if shardable and not layout.offload_parameters:
        offloading.append(_deepspeed(launch, zero=3, offload="parameters"))
    # Either engine keeps float32 copies of what is trained; ZeRO 0 is refused.
    unsharded = layout.engine == "deepspeed" and layout.zero == 0
    half_precision = planned_precision(params) == "float32" and not (trains and unsharded)
    unadapted = [path for path in adapter_settings(params, stage) if _setting(params, path) is None]
    return (
        fewer_replies,
        micro_batches,
        [{f"{launch}.gradient_checkpointing": True}] if trains and not layout.gradient_checkpointing else [],
        sharding,
        [{f"{launch}.frozen": "offload"}] if rolls_out and layout.frozen != "offload" else [],
        [{"base.dtype": "bfloat16"}] if half_precision else [],
        offloading,
        fewer_pairs,
        [{f"{path}.rank": LORA_RANK for path in unadapted}] if unadapted else [],
    )


def _alternative(params: Params, stage: str) -> str:
    """The method that trains the policy in place of PPO, or nothing."""
    return params.policy.method if stage == "ppo" and params.policy.method != "ppo" else ""


def _rolls_out(params: Params, stage: str) -> bool:
    return stage in ("critic", "ppo") and not _alternative(params, stage)


def _smaller_batches(params: Params, before: StageEstimate) -> tuple[list[Changes], list[Changes], list[Changes]]:
    """Batches of half the size: of replies sampled at once, of rows in a training pass, and of pairs."""
    stage, layout, ppo = before.stage, before.layout, params.ppo
    alternative = _alternative(params, stage)
    fewer_replies: list[Changes] = []
    micro_batches: list[Changes] = []
    fewer_pairs: list[Changes] = []
    if alternative:
        method = getattr(params.policy, alternative)
        rows = layout.share(method.batch_size)
        micro_batches += _half(f"policy.{alternative}.micro_batch_size", min(method.micro_batch_size or rows, rows))
        if alternative == "rejection_sampling":
            rows = layout.share(PROMPTS_AT_ONCE * method.replies_per_prompt)
            fewer_replies += _half("ppo.sampling_batch_size", min(ppo.sampling_batch_size or rows, rows))
    elif stage == "ppo":
        rows = min(ppo.selection.batch_size, layout.share(ppo.selection.prompts))
        fewer_replies += _half("ppo.selection.batch_size", rows)
    if _rolls_out(params, stage):
        rows = layout.share(params.critic.batch_size if stage == "critic" else ppo.batch_size)
        fewer_replies += _half("ppo.sampling_batch_size", min(ppo.sampling_batch_size or rows, rows))
        rows = layout.share(max(ppo.batch_size // ppo.minibatches, ppo.ptx.batch_size))
        unset = max(MICRO_BATCH, ppo.ptx.batch_size)
        micro_batches += _half("ppo.micro_batch_size", min(ppo.micro_batch_size or unset, rows))
    if stage == "evaluate":
        fewer_replies += _half("evaluate.batch_size", min(params.evaluate.batch_size, params.evaluate.prompts))
    if stage == "sft":
        rows = layout.share(params.sft.batch_size)
        micro_batches += _half("sft.micro_batch_size", min(params.sft.micro_batch_size or rows, rows))
    if stage in ("reward", "referee", "judge"):
        fewer_pairs += _half(f"{stage}.batch.token_budget", getattr(params, stage).batch.token_budget)
    return fewer_replies, micro_batches, fewer_pairs


def _half(path: str, value: int) -> list[Changes]:
    return [{path: value // 2}] if value > 1 else []


def _deepspeed(launch: str, **settings: Any) -> Changes:
    return {f"{launch}.{name}": value for name, value in {"engine": "deepspeed", **settings}.items()}


def _setting(params: Params, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(params, section), name)

"""What to change when a stage does not fit: settings tried one after another, those that cost least first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.loading import Params
from rlhf_core.errors import RlhfError
from rlhf_core.memory.estimate import EstimateInputs, MemoryEstimate, StageEstimate
from rlhf_core.memory.sharding import ParallelLayout, launch_of, planned_precision
from rlhf_core.memory.stages import estimate_stage
from rlhf_core.ppo.rejection_sampling import PROMPTS_AT_ONCE
from rlhf_core.sampling.token_scoring import MICRO_BATCH

# A change that takes away less than this share of a phase's peak is not worth advising.
WORTHWHILE = 0.02
LORA_RANK = 16
PAIRED = ("reward", "referee", "judge")
Changes = dict[str, Any]


def adapter_settings(params: Params, stage: str) -> tuple[str, ...]:
    """Paths of the settings of a stage's adapters; a critic has some only where there is one."""
    if stage == "ppo":
        without_critic = params.ppo.advantage.critic_free or params.policy.method != "ppo"
        return ("ppo.policy_lora",) if without_critic else ("ppo.policy_lora", "ppo.critic_lora")
    return (f"{stage}.lora",) if stage in (*PAIRED, "critic") else ()


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

    Smaller batches of sampling and of passes change results by rounding; gradient checkpointing costs time; sharding
    and offloading cost communication; smaller optimiser steps and adapters change what is learned and come last. A
    change that turns out not to lower the peak, or not to be needed, is left out again, dear ones first. What is
    claimed is computed from the very list that is returned.
    """
    limit = estimate.limit
    if limit is None:
        return ()
    return tuple(_advise_stage(estimate.inputs, stage, limit) for stage in estimate.stages if stage.peak > limit)


def _advise_stage(inputs: EstimateInputs, stage: StageEstimate, limit: int) -> MemoryAdvice:
    taken: list[Changes] = []
    changed, before = inputs, stage
    while before.peak > limit and (helpful := _first_that_helps(changed, before, limit)) is not None:
        taken.append(helpful.changes)
        changed, before = changed.with_changes(helpful.changes), helpful.after
    # Settings that were changed more than once stand with their last value wherever they are listed.
    final = {path: value for changes in taken for path, value in changes.items()}
    kept = [{path: final[path] for path in paths} for paths in dict.fromkeys(tuple(changes) for changes in taken)]
    goal = max(limit, before.peak)
    for changes in reversed(kept):
        rest = [other for other in kept if other is not changes]
        after = _steps(inputs, stage.stage, rest)
        if after is not None and (after[-1].after if after else stage).peak <= goal:
            kept = rest
    steps = _steps(inputs, stage.stage, kept) or ()
    return MemoryAdvice(stage.stage, steps, (steps[-1].after if steps else stage).peak <= limit)


def _first_that_helps(inputs: EstimateInputs, before: StageEstimate, limit: int) -> AdviceStep | None:
    """The first change after which a phase that is too large is smaller, and none of those larger."""
    too_large = {name: use.total for name, use in before.phases.items() if use.total > limit}
    for changes in _candidates(inputs.params, before):
        for step in _steps(inputs, before.stage, [changes]) or ():
            uses = {name: use.total for name, use in step.after.phases.items()}
            pairs = [(old, uses.get(name, 0)) for name, old in too_large.items()]
            if any(new <= old * (1 - WORTHWHILE) for old, new in pairs) and all(new <= old for old, new in pairs):
                return step
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


def _candidates(params: Params, before: StageEstimate) -> Iterator[Changes]:
    """Changes that may save memory; those that cost least come first."""
    stage, layout = before.stage, before.layout
    launch, trains = f"compute.launch.{stage}", stage != "evaluate"
    rolls_out = stage == "critic" or (stage == "ppo" and params.policy.method == "ppo")
    shardable = trains and launch_of(params, stage).deepspeed is None

    def deepspeed(**settings: Any) -> Changes:
        return {f"{launch}.{name}": value for name, value in {"engine": "deepspeed", **settings}.items()}

    for path, rows in _rows_at_once(params, stage, layout).items():
        if rows > 1:
            yield {path: rows // 2}
    if trains and not layout.gradient_checkpointing:
        yield {f"{launch}.gradient_checkpointing": True}
    if shardable and layout.gpus > 1:
        # Training state is sharded before frozen models: that costs less communication.
        yield from (deepspeed(zero=zero) for zero in range(layout.zero + 1, 3))
        if rolls_out and layout.frozen == "device":
            yield deepspeed(zero=max(layout.zero, 1), frozen="sharded")
    if rolls_out and layout.frozen != "offload":
        yield {f"{launch}.frozen": "offload"}
    # Either engine keeps float32 copies of what is trained; ZeRO 0 is refused.
    if planned_precision(params) == "float32" and not (trains and layout.engine == "deepspeed" and layout.zero == 0):
        yield {"base.dtype": "bfloat16"}
    if shardable and layout.gpus > 1 and layout.zero < 3:
        yield deepspeed(zero=3)
    if shardable and not layout.offload_optimizer:
        yield deepspeed(zero=max(layout.zero, 2), offload="optimizer")
    if shardable and not layout.offload_parameters:
        yield deepspeed(zero=3, offload="parameters")
    if stage in PAIRED and (tokens := getattr(params, stage).batch.token_budget) > 1:
        yield {f"{stage}.batch.token_budget": tokens // 2}
    settings = [path.split(".") for path in adapter_settings(params, stage)]
    unadapted = [f"{section}.{name}" for section, name in settings if getattr(getattr(params, section), name) is None]
    if unadapted:
        yield {f"{path}.rank": LORA_RANK for path in unadapted}


def _rows_at_once(params: Params, stage: str, layout: ParallelLayout) -> dict[str, int]:
    """How many rows are sampled at once or go through a training pass together, by the setting that bounds them."""
    ppo, method = params.ppo, params.policy.method if stage == "ppo" else ""

    def bounded(setting: int | None, rows: int) -> int:
        return min(setting or rows, layout.share(rows))

    if stage == "evaluate":
        return {"evaluate.batch_size": min(params.evaluate.batch_size, params.evaluate.prompts)}
    if stage == "sft":
        return {"sft.micro_batch_size": bounded(params.sft.micro_batch_size, params.sft.batch_size)}
    if method == "dpo":
        dpo = params.policy.dpo
        return {"policy.dpo.micro_batch_size": bounded(dpo.micro_batch_size, dpo.batch_size)}
    if method == "rejection_sampling":
        config = params.policy.rejection_sampling
        sampled = PROMPTS_AT_ONCE * config.replies_per_prompt
        return {
            "ppo.sampling_batch_size": bounded(ppo.sampling_batch_size, sampled),
            "policy.rejection_sampling.micro_batch_size": bounded(config.micro_batch_size, config.batch_size),
        }
    if stage not in ("critic", "ppo"):
        return {}
    selected = {"ppo.selection.batch_size": bounded(ppo.selection.batch_size, ppo.selection.prompts)}
    in_pass = ppo.micro_batch_size or max(MICRO_BATCH, ppo.ptx.batch_size)
    return (selected if stage == "ppo" else {}) | {
        "ppo.sampling_batch_size": bounded(
            ppo.sampling_batch_size, params.critic.batch_size if stage == "critic" else ppo.batch_size
        ),
        "ppo.micro_batch_size": bounded(in_pass, max(ppo.batch_size // ppo.minibatches, ppo.ptx.batch_size)),
    }

"""What to change when a stage does not fit: settings tried one after another, those that cost least
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.params import Params
from rlhf_core.errors import RlhfError
from rlhf_core.models.precision import weights_precision
from rlhf_extras.memory.stage_plan import StagePlan
from rlhf_extras.memory.stages import plan_stage
from rlhf_extras.memory.workload import PAIRED

# A change that takes away less than this share of a phase's peak is not worth advising.
WORTHWHILE = 0.02
LORA_RANK = 16
# What every stage reads: advised once, for all of them.
SHARED = ("base.dtype",)
Changes = dict[str, Any]


def adapter_settings(params: Params, stage: str) -> tuple[str, ...]:
    """Paths of the settings of a stage's adapters; a critic has some only where there is one."""
    if stage == "ppo":
        without_critic = params.ppo.advantage.critic_free or params.policy.method != "ppo"
        return ("ppo.policy_lora",) if without_critic else ("ppo.policy_lora", "ppo.critic_lora")
    return (f"{stage}.lora",) if stage in (*PAIRED, "critic") else ()


@dataclass(frozen=True)
class AdviceStep:
    """``changes`` are settings by path, and ``after`` the stage with them and those of every step
    before.
    """

    changes: Changes
    after: StagePlan

    @property
    def assignments(self) -> str:
        """As ``--set`` takes them."""
        return as_assignments(self.changes)


def as_assignments(changes: Changes) -> str:
    """Write settings as ``--set`` takes them."""
    given = []
    for path, value in changes.items():
        given.append(f"{path}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(given)


def advise(plan: StagePlan) -> list[AdviceStep]:
    """The settings that make a stage fit, or come nearest; none where it fits, or the limit is not
    known.

    Smaller batches of sampling and of passes change results by rounding; gradient checkpointing
    costs time; sharding and offloading cost communication; smaller optimiser steps and adapters
    change what is learned and come last. A change that turns out not to lower the peak, or not to
    be needed, is left out again, dear ones first. What is claimed is computed from the very list
    that is returned.
    """
    taken: list[Changes] = []
    before = plan
    while not before.fits and (helpful := _first_that_helps(before)) is not None:
        taken.append(helpful.changes)
        before = helpful.after
    # Settings that were changed more than once stand with their last value wherever they are
    # listed.
    final = {path: value for changes in taken for path, value in changes.items()}
    kept = [
        {path: final[path] for path in paths}
        for paths in dict.fromkeys(tuple(changes) for changes in taken)
    ]
    for changes in reversed(kept):
        rest = [other for other in kept if other is not changes]
        steps = _steps(plan, rest)
        if steps is None:
            continue
        after = steps[-1].after if steps else plan
        if after.fits or after.peak <= before.peak:
            kept = rest
    return _steps(plan, kept) or []


def advise_all(plans: Sequence[StagePlan]) -> dict[str, list[AdviceStep]]:
    """The advice on each stage that does not fit. A setting that all stages read comes first in each
    as soon as one of them needs it, so that what a stage is told counts with it.
    """
    unfit = [plan for plan in plans if not plan.fits]
    advice = {plan.stage: advise(plan) for plan in unfit}
    shared: Changes = {}
    for steps in advice.values():
        for step in steps:
            shared |= {path: step.changes[path] for path in SHARED if path in step.changes}
    if shared:
        for plan in unfit:
            first = _steps(plan, [shared]) or []
            advice[plan.stage] = [*first, *advise(first[-1].after if first else plan)]
    return advice


def _first_that_helps(before: StagePlan) -> AdviceStep | None:
    """The first change after which a phase that is too large is smaller, and none of those
    larger.
    """
    too_large = {
        name: use.total for name, use in before.phases.items() if use.total > (before.limit or 0)
    }
    for changes in _candidates(before):
        for step in _steps(before, [changes]) or ():
            uses = {name: use.total for name, use in step.after.phases.items()}
            pairs = [(old, uses.get(name, 0)) for name, old in too_large.items()]
            if any(new <= old * (1 - WORTHWHILE) for old, new in pairs) and all(
                new <= old for old, new in pairs
            ):
                return step
    return None


def _steps(plan: StagePlan, taken: Sequence[Changes]) -> list[AdviceStep] | None:
    """The stage after each of ``taken``; None where one contradicts other settings, or needs a
    missing package.
    """
    steps = []
    try:
        for changes in taken:
            plan = plan_stage(plan.inputs.with_changes(changes), plan.stage)
            steps.append(AdviceStep(changes, plan))
    except RlhfError:
        return None
    return steps


def _candidates(plan: StagePlan) -> Iterator[Changes]:
    """Changes that may save memory, those that cost least first; what the settings contradict is
    tried in vain.
    """
    params, layout, rolls_out = plan.inputs.params, plan.layout, "scoring" in plan.phases
    launch = f"compute.launch.{plan.stage}"

    def deepspeed(**settings: Any) -> Changes:
        return {
            f"{launch}.{name}": value for name, value in {"engine": "deepspeed", **settings}.items()
        }

    yield from ({path: rows // 2} for path, rows in plan.rows.items() if rows > 1)
    yield {f"{launch}.gradient_checkpointing": True}
    if layout.gpus > 1:
        # Training state is sharded before frozen models: that costs less communication.
        yield from (deepspeed(zero=zero) for zero in range(layout.zero + 1, 3))
        if rolls_out and layout.frozen == "device":
            yield deepspeed(zero=max(layout.zero, 1), frozen="sharded")
    if plan.on_gpu or weights_precision("auto") == "bfloat16":  # emulated, it takes far longer
        yield {"base.dtype": "bfloat16"}
    if plan.on_gpu:  # elsewhere there is no other memory to move anything to
        if rolls_out:
            yield {f"{launch}.frozen": "offload"}
        if layout.gpus > 1 and layout.zero < 3:
            yield deepspeed(zero=3)
        if not layout.offload_optimizer:
            yield deepspeed(zero=max(layout.zero, 2), offload="optimizer")
        yield deepspeed(zero=3, offload="parameters")
    if plan.stage in PAIRED and (tokens := getattr(params, plan.stage).batch.token_budget) > 1:
        yield {f"{plan.stage}.batch.token_budget": tokens // 2}
    settings = [path.split(".") for path in adapter_settings(params, plan.stage)]
    unadapted = [
        f"{section}.{name}"
        for section, name in settings
        if getattr(getattr(params, section), name) is None
    ]
    if unadapted:
        yield {f"{path}.rank": LORA_RANK for path in unadapted}

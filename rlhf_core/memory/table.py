"""A plan as text for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_core.memory.advice import Advice
from rlhf_core.memory.estimate import GIB, Plan
from rlhf_core.memory.placement import Placement
from rlhf_core.memory.setting import StagePlan
from rlhf_core.memory.usage import KINDS, Use

MIB = 1 << 20
HEADS = ("weights", "gradients", "optimiser", "activations", "KV cache", "logits", "other", "total")


def text(plan: Plan, advice: Sequence[Advice] = ()) -> str:
    """Roles and phases of every stage, the peak against the limit, and what to change."""
    blocks = [_head(plan), *(_stage(stage) for stage in plan.stages), _verdict(plan), *(_advice(one) for one in advice)]
    return "\n\n".join(blocks)


def one_line(plan: Plan, advice: Sequence[Advice]) -> str:
    """Why the plan does not fit, and the settings with which it would, in one line."""
    stage, limit = plan.worst, plan.limit or 0
    words = (
        f"{stage.stage} does not fit: {gib(stage.peak.use.total)} of tensors in '{stage.peak.name}' on "
        f"{_gpus(stage.placement)} of {_memory(plan)}, where {gib(limit)} may be used"
    )
    for one in advice:
        if one.stage == stage.stage and one.fits:
            changes = " ".join(step.words for step in one.steps)
            return f"{words}; it would fit with {changes} ({gib(one.steps[-1].after.peak.use.total)})"
    return f"{words}; no setting makes it fit: take more or larger GPUs, or a smaller model"


def as_json(plan: Plan, advice: Sequence[Advice]) -> dict[str, Any]:
    """All figures in bytes."""
    return {
        "fits": plan.fits,
        "peak": plan.peak,
        "limit": plan.limit,
        "stage": plan.worst.stage,
        "phase": plan.worst.peak.name,
        "parameters": plan.recipe.shape.causal_lm,
        "lengths": plan.recipe.lengths.source,
        "stages": {stage.stage: _stage_json(stage) for stage in plan.stages},
        "advice": {one.stage: _advice_json(one) for one in advice},
    }


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where that is less than a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


def _head(plan: Plan) -> str:
    shape, lengths, params = plan.recipe.shape, plan.recipe.lengths, plan.recipe.params
    model = (
        f"model   {shape.causal_lm / 1e6:.1f} M parameters in {params.base.dtype}: {shape.layers} layers, hidden "
        f"{shape.hidden}, vocabulary {shape.vocabulary}{', tied' if shape.tied else ''}"
    )
    rollout = f"prompt {lengths.prompt} + reply {params.ppo.max_new_tokens}"
    training = f"SFT {lengths.demonstrations.width}, pairs {lengths.pairs.width}, ptx {lengths.ptx.width}"
    return f"{model}\ntokens  {rollout}, {training}: from {lengths.source}"


def _stage(stage: StagePlan) -> str:
    """What the stage's models hold and what its phases need, in GiB, or in MiB where that is easier to read."""
    unit, name = (GIB, "GiB") if stage.peak.use.total >= GIB else (MIB, "MiB")
    rows: list[tuple[str, ...]] = [(f"{name} per GPU", *HEADS)]
    rows += [("held throughout",)] if stage.roles else []
    rows += [(f"  {role.name}", *_cells(role.held, unit)) for role in stage.roles]
    rows.append(("at the peak of each phase",))
    for phase in stage.phases:
        rows.append((f"  {phase.name}{' *' if phase is stage.peak else ''}", *_cells(phase.use, unit)))
    lines = [f"{stage.stage} on {_placed(stage.placement)}", *_aligned(rows)]
    if stage.host:
        lines.append(f"and {gib(stage.host)} of host memory for each GPU")
    return "\n".join(lines)


def _cells(use: Use, unit: int) -> tuple[str, ...]:
    sizes = [getattr(use, kind) for kind in KINDS] + [use.total]
    return tuple(f"{size / unit:.2f}" if size else "" for size in sizes)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = len(HEADS) + 1
    full = [(*row, *[""] * (columns - len(row))) for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(columns)]
    lines = []
    for first, *others in full:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def _verdict(plan: Plan) -> str:
    stage = plan.worst
    found = f"peak {gib(plan.peak)} per GPU: {stage.stage}, {stage.peak.name}"
    if plan.limit is None:
        return f"{found}. Give --gpu-memory (GiB) to hear whether it fits"
    share = plan.peak / plan.limit if plan.limit else float("inf")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return f"{found}. It {verdict}: {share:.0%} of the {gib(plan.limit)} that tensors may take of {_memory(plan)}"


def _advice(advice: Advice) -> str:
    if not advice.steps:
        return f"{advice.stage}: no setting helps; take more or larger GPUs, or a smaller model"
    lines = [f"to make {advice.stage} fit, each with those before it:"]
    for number, step in enumerate(advice.steps, 1):
        peak = step.after.peak
        lines.append(f"  {number}. {step.words}: {gib(peak.use.total)} ({peak.name})")
    lines.append("  so it fits" if advice.fits else "  that is not enough: more or larger GPUs, or a smaller model")
    return "\n".join(lines)


def _placed(place: Placement) -> str:
    options = [
        "plain torch" if place.engine == "local" else f"DeepSpeed ZeRO {place.zero}",
        "gradient checkpointing" if place.gradient_checkpointing else "",
        "optimiser and parameters offloaded" if place.offload_parameters else "",
        "optimiser offloaded" if place.offload_optimizer and not place.offload_parameters else "",
        {"device": "", "offload": "frozen models offloaded", "sharded": "frozen models sharded"}[place.frozen],
    ]
    return ", ".join([_gpus(place), *(option for option in options if option)])


def _gpus(place: Placement) -> str:
    return "1 GPU" if place.gpus == 1 else f"{place.gpus} GPUs"


def _memory(plan: Plan) -> str:
    return f"{plan.recipe.params.plan.gpu_memory_gb:g} GiB"


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "placement": vars(stage.placement),
        "peak": stage.peak.use.total,
        "host": stage.host,
        "roles": {role.name: _use_json(role.held) | {"parameters": role.parameters} for role in stage.roles},
        "phases": {phase.name: _use_json(phase.use) for phase in stage.phases},
    }


def _advice_json(advice: Advice) -> dict[str, Any]:
    steps = [{"changes": step.changes, "peak": step.after.peak.use.total} for step in advice.steps]
    return {"fits": advice.fits, "steps": steps}


def _use_json(use: Use) -> dict[str, int]:
    return {**vars(use), "total": use.total}

"""A plan as text for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_core.plan.advice import Advice
from rlhf_core.plan.estimate import GIB, Plan
from rlhf_core.plan.placement import Placement
from rlhf_core.plan.setting import StagePlan
from rlhf_core.plan.usage import KINDS, Use

MIB = 1 << 20
HEADS = ("weights", "gradients", "optimiser", "activations", "KV cache", "logits", "other", "total")


def text(plan: Plan, advice: Sequence[Advice] = ()) -> str:
    """Roles and phases of every stage, the peak against the limit, and what to change."""
    blocks = [_head(plan), *(_stage(stage) for stage in plan.stages), _verdict(plan)]
    if advice:
        blocks.append(_advice(advice))
    return "\n\n".join(blocks)


def one_line(plan: Plan, advice: Sequence[Advice]) -> str:
    """Why the plan does not fit, and the first changes that would make it, in one line."""
    stage, limit = plan.worst, plan.limit or 0
    words = (
        f"{stage.stage} does not fit: {gib(stage.peak.use.total)} of tensors per GPU in '{stage.peak.name}', "
        f"{gib(limit)} may be used on {_gpus(plan.setting.placement)} of {_memory(plan)}"
    )
    if advice and advice[-1].plan.fits:
        changes = "; ".join(step.change for step in advice)
        return f"{words}. It would fit with: {changes} ({gib(advice[-1].plan.peak)})"
    return f"{words}. No setting makes it fit; take more or larger GPUs, or a smaller model"


def as_json(plan: Plan, advice: Sequence[Advice]) -> dict[str, Any]:
    """All figures in bytes."""
    return {
        "fits": plan.fits,
        "peak": plan.peak,
        "limit": plan.limit,
        "stage": plan.worst.stage,
        "phase": plan.worst.peak.name,
        "placement": vars(plan.setting.placement),
        "lengths": plan.setting.lengths.source,
        "stages": {stage.stage: _stage_json(stage) for stage in plan.stages},
        "advice": [{"change": step.change, "peak": step.plan.peak, "fits": step.plan.fits} for step in advice],
    }


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where that is less than a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


def _head(plan: Plan) -> str:
    shape, place, lengths = plan.setting.shape, plan.setting.placement, plan.setting.lengths
    model = (
        f"model      {shape.causal_lm / 1e6:.1f} M parameters: {shape.layers} layers, hidden {shape.hidden}, "
        f"vocabulary {shape.vocabulary}{', tied' if shape.tied else ''}"
    )
    options = [
        place.engine if place.engine == "local" else f"deepspeed, ZeRO stage {place.zero_stage}",
        place.precision,
        "gradient checkpointing" if place.gradient_checkpointing else "",
        f"LoRA rank {place.lora_rank}" if place.lora_rank else "",
        "optimiser and parameters offloaded" if place.offload_parameters else "",
        "optimiser offloaded" if place.offload_optimizer and not place.offload_parameters else "",
        f"frozen models {place.frozen.replace('_', ' ')}",
    ]
    widths = f"prompt {lengths.prompt} + reply {plan.setting.params.ppo.max_new_tokens}"
    training = f"SFT {lengths.demonstrations.width}, pairs {lengths.pairs.width}, ptx {lengths.ptx.width}"
    return "\n".join(
        [
            model,
            f"placement  {_gpus(place)}, {', '.join(option for option in options if option)}",
            f"tokens     {widths}, {training}; from {lengths.source}",
        ]
    )


def _stage(stage: StagePlan) -> str:
    """What the stage's models hold and what its phases need, in GiB, or in MiB where that is easier to read."""
    unit, name = (GIB, "GiB") if stage.peak.use.total >= GIB else (MIB, "MiB")
    rows: list[tuple[str, ...]] = [(f"{stage.stage}, {name} per GPU", *HEADS), ("held throughout",)]
    rows += [(f"  {role.name}", *_cells(role.held, unit)) for role in stage.roles]
    rows.append(("at the peak of each phase",))
    for phase in stage.phases:
        rows.append((f"  {phase.name}{' *' if phase is stage.peak else ''}", *_cells(phase.use, unit)))
    lines = _aligned(rows)
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


def _advice(advice: Sequence[Advice]) -> str:
    lines = ["to make it fit, each with those before it:"]
    for number, step in enumerate(advice, 1):
        where = f"{step.plan.worst.stage}, {step.plan.worst.peak.name}"
        lines.append(f"  {number}. {step.change}: {gib(step.plan.peak)} ({where}){', fits' if step.plan.fits else ''}")
    if not advice[-1].plan.fits:
        lines.append("  that is not enough: take more or larger GPUs, or a smaller model")
    return "\n".join(lines)


def _gpus(place: Placement) -> str:
    return "1 GPU" if place.gpus == 1 else f"{place.gpus} GPUs"


def _memory(plan: Plan) -> str:
    return f"{plan.setting.params.plan.gpu_memory_gb:g} GiB"


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "peak": stage.peak.use.total,
        "host": stage.host,
        "roles": {role.name: _use_json(role.held) | {"parameters": role.parameters} for role in stage.roles},
        "phases": {phase.name: _use_json(phase.use) for phase in stage.phases},
    }


def _use_json(use: Use) -> dict[str, int]:
    return {**vars(use), "total": use.total}

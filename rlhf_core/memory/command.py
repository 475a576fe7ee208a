"""``rlhf plan``: from a recipe and the command line's options to an estimate, as text and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import PARAMS_FILE, Params, check_params, load_params, merge, overlays_of, overridden
from rlhf_core.config.operations import Trained
from rlhf_core.config.recipe import profiles_of
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.memory.advice import MemoryAdvice, adapter_settings, advise
from rlhf_core.memory.architecture import starting_architecture
from rlhf_core.memory.dry_run import MEMORY_KINDS, MemoryUse, ModelVariant, model_size
from rlhf_core.memory.estimate import PROCESS_BASE, EstimateInputs, MemoryEstimate, StageEstimate
from rlhf_core.memory.sequence_lengths import lengths_from_limits, lengths_of_workspace
from rlhf_core.memory.sharding import GIB, ParallelLayout, planned_precision
from rlhf_core.memory.stages import STAGES, estimate_memory, planned_stages

MIB = 1 << 20
# Of MEMORY_KINDS, short enough for a table of 80 columns.
COLUMNS = ("weights", "grads", "optim", "activ", "cache", "logits", "other", "total")
LARGER = "more or larger GPUs, or a smaller model"


def estimate_text(estimate: MemoryEstimate, advice: Sequence[MemoryAdvice] = ()) -> str:
    """Roles and phases of every stage, the peak against the limit, and what to change."""
    inputs, lengths, worst, limit = estimate.inputs, estimate.inputs.lengths, estimate.worst, estimate.limit
    config = inputs.architecture.config(None)
    heading = (
        f"model   {_policy_parameters(estimate) / 1e6:.1f} M parameters in {planned_precision(inputs.params)}: "
        f"{inputs.architecture.layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
        f"{', tied' if config.tie_word_embeddings else ''}\n"
        f"tokens  prompt {lengths.prompt} + reply {inputs.params.ppo.max_new_tokens}, SFT "
        f"{lengths.demonstrations.width}, pairs {lengths.pairs.width}, ptx {lengths.ptx.width}\n"
        f"        from {lengths.source}"
    )
    verdict = f"peak {gib(worst.peak)} per GPU: {worst.stage}, {worst.worst_phase}."
    if limit is None:
        verdict += "\nGive --gpu-memory (GiB) to learn whether it fits"
    else:
        share = worst.peak / limit if limit else float("inf")
        verdict += (
            f" It {'fits' if estimate.fits else 'DOES NOT FIT'}: {share:.0%} of the {gib(limit)} that tensors may"
        )
        verdict += f" take of {_gpu_memory(estimate)}"
    stages = [
        "\n".join([_stage_text(stage, for_gpu=limit is not None), *_server_line(estimate, stage)])
        for stage in estimate.stages
    ]
    return "\n\n".join([heading, *stages, verdict, *map(_advice_text, advice)])


def refusal_line(estimate: MemoryEstimate, advice: Sequence[MemoryAdvice]) -> str:
    """Why the estimate does not fit, and the settings with which it would, in one line."""
    stage = estimate.worst
    reason = (
        f"{stage.stage} does not fit: {gib(stage.peak)} of tensors in '{stage.worst_phase}' on "
        f"{_gpus(stage.layout)} of {_gpu_memory(estimate)}, where {gib(estimate.limit or 0)} may be used"
    )
    for one in advice:
        if one.stage == stage.stage and one.fits:
            changes = " ".join(step.assignments for step in one.steps)
            return f"{reason}; it would fit with {changes} ({gib(one.steps[-1].after.peak)})"
    return f"{reason}; no setting makes it fit: take {LARGER}"


def estimate_json(estimate: MemoryEstimate, advice: Sequence[MemoryAdvice]) -> dict[str, Any]:
    """All sizes in bytes."""
    return {
        "fits": estimate.fits,
        "peak": estimate.peak,
        "limit": estimate.limit,
        "stage": estimate.worst.stage,
        "phase": estimate.worst.worst_phase,
        "parameters": _policy_parameters(estimate),
        "lengths": estimate.inputs.lengths.source,
        "stages": {
            stage.stage: {
                "placement": vars(stage.layout),
                "peak": stage.peak,
                "host": stage.host,
                "process": stage.process,
                "sampler_share": estimate.sampler_share(stage),
                "roles": {
                    role.name: _use_json(role.footprint.held) | {"parameters": role.footprint.parameters}
                    for role in stage.roles
                },
                "phases": {name: _use_json(use) for name, use in stage.phases.items()},
            }
            for stage in estimate.stages
        },
        "advice": {
            one.stage: {
                "fits": one.fits,
                "steps": [{"changes": step.changes, "peak": step.after.peak} for step in one.steps],
            }
            for one in advice
        },
    }


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where that is less than a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


def _policy_parameters(estimate: MemoryEstimate) -> int:
    inputs = estimate.inputs
    return model_size(ModelVariant(inputs.architecture, "causal_lm", planned_precision(inputs.params))).parameters


def _stage_text(stage: StageEstimate, *, for_gpu: bool) -> str:
    """What the stage's models hold and what its phases need, in GiB, or in MiB where that is easier to read; and the
    whole process on a CPU, unless the plan is for a GPU of known memory."""
    unit, name = (GIB, "GiB") if stage.peak >= GIB else (MIB, "MiB")
    table = Table(f"{name} per GPU", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")

    def add(title: str, uses: Mapping[str, MemoryUse]) -> None:
        if uses:
            table.add_row(title)
        for name, use in uses.items():
            sizes = [*(getattr(use, kind) for kind in MEMORY_KINDS), use.total]
            # Five characters at most below 10,000: hundreds need no second decimal.
            cells = [f"{size / unit:.{2 if size < 99.995 * unit else 1}f}" if size else "" for size in sizes]
            table.add_row(f"  {name}", *cells)

    add("held throughout", {role.name: role.footprint.held for role in stage.roles})
    marked = {f"{name} *" if name == stage.worst_phase else name: use for name, use in stage.phases.items()}
    add("at each phase's peak", marked)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        console.print(table, highlight=False)
    lines = [f"{stage.stage} on {_layout_text(stage.layout)}", *map(str.rstrip, capture.get().splitlines())]
    if stage.host:
        lines.append(f"and {gib(stage.host)} of host memory for each GPU")
    if stage.process is not None and not for_gpu:
        allowance = f"; bfloat16 allowance {gib(stage.allowance)}" if stage.allowance else ""
        lines.append(f"on a CPU the whole process: {gib(stage.process)}")
        lines.append(f"  libraries {gib(PROCESS_BASE)}; freed memory kept {gib(stage.freed)}{allowance}")
    return "\n".join(lines)


def _server_line(estimate: MemoryEstimate, stage: StageEstimate) -> list[str]:
    """What is left to a vLLM server on the same GPU, as the server's own option; nothing where there is none."""
    share = estimate.sampler_share(stage)
    return [] if share is None else [f"vLLM on the same GPU: at most --gpu-memory-utilization {int(share * 100) / 100}"]


def _advice_text(advice: MemoryAdvice) -> str:
    if not advice.steps:
        return f"{advice.stage}: no setting helps; take {LARGER}"
    lines = [f"to make {advice.stage} fit, each with those before it:"]
    for number, step in enumerate(advice.steps, 1):
        lines.append(f"  {number}. {step.assignments}: {gib(step.after.peak)} ({step.after.worst_phase})")
    lines.append("  so it fits" if advice.fits else f"  that is not enough: {LARGER}")
    return "\n".join(lines)


def _layout_text(layout: ParallelLayout) -> str:
    offloaded = {"optimiser": layout.offload_optimizer, "parameters": layout.offload_parameters}
    options = [
        "plain torch" if layout.engine == "local" else f"DeepSpeed ZeRO {layout.zero}",
        "gradient checkpointing" if layout.gradient_checkpointing else "",
        " and ".join(what for what, away in offloaded.items() if away) + " offloaded"
        if any(offloaded.values())
        else "",
        {"device": "", "offload": "frozen models offloaded", "sharded": "frozen models sharded"}[layout.frozen],
    ]
    return ", ".join([_gpus(layout), *filter(None, options)])


def _gpus(layout: ParallelLayout) -> str:
    return "1 GPU" if layout.gpus == 1 else f"{layout.gpus} GPUs"


def _gpu_memory(estimate: MemoryEstimate) -> str:
    return f"{estimate.inputs.params.plan.gpu_memory_gb:g} GiB"


def _use_json(use: MemoryUse) -> dict[str, int]:
    return {**vars(use), "total": use.total}


class MemoryExceeded(RlhfError):
    """A stage cannot fit the GPUs that it is meant for."""


@dataclass(frozen=True)
class PlanOptions:
    """The command line's options, None where not given. ``bf16``: weights in bfloat16, or (False) float32."""

    gpus: int | None = None
    gpu_memory: float | None = None
    zero: int | None = None
    offload: str | None = None
    frozen: str | None = None
    gradient_checkpointing: bool | None = None
    bf16: bool | None = None
    lora_rank: int | None = None
    prompt_tokens: int | None = None

    def settings(self, params: Params, stages: Sequence[str]) -> dict[str, Any]:
        """The same as settings by path, of ``stages`` of ``params``. ZeRO, offloading and sharding imply DeepSpeed."""
        sharding = self.zero is not None or self.offload is not None or self.frozen == "sharded"
        launch = {
            "engine": "deepspeed" if sharding else None,
            "processes": self.gpus,
            "zero": self.zero,
            "offload": self.offload,
            "frozen": self.frozen,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        settings: dict[str, Any] = {
            "plan.gpu_memory_gb": self.gpu_memory,
            "plan.prompt_tokens": self.prompt_tokens,
            "base.dtype": None if self.bf16 is None else "bfloat16" if self.bf16 else "float32",
        }
        for stage in stages:
            if stage in get_args(Trained):
                settings |= {f"compute.launch.{stage}.{name}": value for name, value in launch.items()}
            settings |= {f"{path}.rank": self.lora_rank for path in adapter_settings(params, stage)}
        return {path: value for path, value in settings.items() if value is not None}


@dataclass(frozen=True)
class PlanRequest:
    """What to estimate.

    Attributes:
        root: The workspace.
        profile: An overlay on its params.yaml.
        sets: Assignments ``section.key=value`` over that.
        options: Those of the command line, which stand for settings too.
        stages: Only these; all where empty.
        config: A config.json in place of the starting model's.
    """

    root: Path
    profile: str | None = None
    sets: Sequence[str] = ()
    options: PlanOptions = field(default_factory=PlanOptions)
    stages: Sequence[str] = ()
    config: Path | None = None


def estimate_of(request: PlanRequest) -> MemoryEstimate:
    """Estimate what ``request`` asks for. Lengths come from the workspace's data, unless a profile or override may
    have changed what that data would be."""
    params = params_of(request)
    architecture = starting_architecture(params.base, request.root, request.config)
    lengths = None
    if not (request.profile or request.sets or request.config):
        lengths = lengths_of_workspace(request.root, params, architecture.positions)
    lengths = lengths or lengths_from_limits(params, architecture.positions)
    if request.options.prompt_tokens is not None:
        lengths = replace(lengths, prompt=request.options.prompt_tokens)
    return estimate_memory(EstimateInputs(params, architecture, lengths, request.root), request.stages)


def describe(estimate: MemoryEstimate, *, as_json: bool = False) -> str:
    """The whole estimate with advice, as a table or as JSON."""
    advice = advise(estimate)
    return json.dumps(estimate_json(estimate, advice), indent=2) if as_json else estimate_text(estimate, advice)


def check(request: PlanRequest) -> str:
    """One line that says that the stages fit, or that nothing is known against it; ``MemoryExceeded`` when they do not.

    Only what is known to be too large is refused: a stage that runs no model, a GPU of unknown memory or a model of
    unknown sizes passes.
    """
    params = params_of(request)
    stages = [stage for stage in request.stages if stage in planned_stages(params)]
    if request.stages and not stages:
        return f"not checked: no memory is planned for {', '.join(request.stages)}"
    if params.plan.gpu_memory_gb is None:
        return "not checked: plan.gpu_memory_gb is not set"
    try:
        estimate = estimate_of(replace(request, stages=stages))
    except ConfigError:
        raise
    except RlhfError as error:  # of an unknown model, or adapters without the package for them
        return f"not checked: {error}"
    if not estimate.fits:
        raise MemoryExceeded(refusal_line(estimate, advise(estimate)))
    names = ", ".join(stage.stage for stage in estimate.stages)
    return f"{names}: {estimate.peak / (estimate.limit or 1):.0%} of what tensors may take of a GPU"


def params_of(request: PlanRequest) -> Params:
    """The settings that ``request`` asks about."""
    load_params(request.root)  # what is wrong with the file itself is reported by its path
    recipe = (request.root / PARAMS_FILE).read_text(encoding="utf-8")
    overlays = overlays_of(recipe, profiles_of(request.root), request.profile, request.sets)
    recipe = merge(recipe, overlays, request.sets)
    document = yaml_text.plain(yaml_text.parse(recipe, PARAMS_FILE))
    settings = request.options.settings(check_params(document, "parameters"), request.stages or tuple(STAGES))
    return check_params(overridden(document, settings), "parameters")

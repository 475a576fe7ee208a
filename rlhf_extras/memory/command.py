"""``rlhf plan``: from a recipe and the command line's options to a plan, as text and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import PARAMS_FILE, check_params, load_params
from rlhf_core.config.operations import Trained
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import overlaid, overlays_of, overridden
from rlhf_core.config.recipe import profiles_of
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.forecast import as_text
from rlhf_core.models.architecture import depth_of, positions_of
from rlhf_core.stages.pair_supply import DataSupply, supply_of_files, supply_of_workspace
from rlhf_core.stages.run_forecasts import HOURS, lines_text
from rlhf_extras.memory.advice import SHARED, AdviceStep, adapter_settings, advise, advise_all
from rlhf_extras.memory.architecture import starting_architecture
from rlhf_extras.memory.dry_run import MEMORY_KINDS, MemoryUse, ModelVariant, model_size
from rlhf_extras.memory.forecast import memory_here, memory_line, needed_by, stages_at_once
from rlhf_extras.memory.probe import data_shape, hours_of_run
from rlhf_extras.memory.sequence_lengths import (
    SequenceLengths,
    lengths_from_limits,
    lengths_of_rows,
    lengths_of_workspace,
)
from rlhf_extras.memory.sharding import GIB, MIB, ParallelLayout, gib, planned_precision
from rlhf_extras.memory.stage_plan import EstimateInputs, StagePlan
from rlhf_extras.memory.stages import STAGES, plan_stages, planned_stages, require_planned
from rlhf_extras.memory.times import h100, stage_times, times_text
from rlhf_extras.memory.workload import DataShape, steps_short_of_rows, working_stages

# Of MEMORY_KINDS, short enough for a table of 80 columns.
COLUMNS = ("weights", "grads", "optim", "activ", "cache", "logits", "other", "total")
LARGER = "more or larger GPUs, or a smaller model"
# What to change, by the stage that does not fit.
Advice = Mapping[str, Sequence[AdviceStep]]
# Key in JSON, text, and JSON of a further part of the answer.
Section = tuple[str, str, dict[str, Any]]


class MemoryExceeded(RlhfError):
    """A stage cannot fit the GPUs that it is meant for."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan: a workspace's settings with those of the command line, each None where not
    given.

    Attributes:
        root: The workspace.
        profile: An overlay on its params.yaml.
        sets: Assignments ``section.key=value`` over that.
        stages: Only these; all where empty.
        config: A config.json in place of the starting model's.
        bf16: Weights in bfloat16, or (False) float32.
    """

    root: Path
    profile: str | None = None
    sets: Sequence[str] = ()
    stages: Sequence[str] = ()
    config: Path | None = None
    gpus: int | None = None
    gpu_memory: float | None = None
    zero: int | None = None
    offload: str | None = None
    frozen: str | None = None
    gradient_checkpointing: bool | None = None
    bf16: bool | None = None
    lora_rank: int | None = None
    prompt_tokens: int | None = None

    @property
    def params(self) -> Params:
        """The settings that it asks about."""
        load_params(self.root)  # what is wrong with the file itself is reported by its path
        recipe = (self.root / PARAMS_FILE).read_text(encoding="utf-8")
        recipe = overlaid(
            recipe, overlays_of(recipe, profiles_of(self.root), self.profile, self.sets), self.sets
        )
        document = yaml_text.plain(yaml_text.parse(recipe, PARAMS_FILE))
        return check_params(
            overridden(document, self._options(check_params(document, "parameters"))), "parameters"
        )

    def _options(self, params: Params) -> dict[str, Any]:
        """The options as settings of ``params`` by path. ZeRO, offloading and sharding imply
        DeepSpeed.
        """
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
        for stage in self.stages or STAGES:
            if stage in get_args(Trained):
                settings |= {
                    f"compute.launch.{stage}.{name}": value for name, value in launch.items()
                }
            settings |= {f"{path}.rank": self.lora_rank for path in adapter_settings(params, stage)}
        return {path: value for path, value in settings.items() if value is not None}

    @cached_property
    def supply(self) -> DataSupply:
        """What is known of the data, read once; its refusal is also that of data which cannot be
        read.

        Clean data of the workspace answer for its own settings alone.
        """
        params = self.params
        try:
            if same_data(load_params(self.root), params):
                return supply_of_workspace(self.root, params)
            return supply_of_files(self.root, params)
        except RlhfError as error:
            return DataSupply(refusal=str(error))

    def plans(self) -> list[StagePlan]:
        """Plan what is asked for."""
        params = self.params
        require_planned(params, self.stages)
        architecture = starting_architecture(params.base, self.root, self.config)
        lengths = self._lengths(params, positions_of(architecture.config()))
        if self.prompt_tokens is not None:
            lengths = replace(lengths, prompt=self.prompt_tokens)
        return plan_stages(EstimateInputs(params, architecture, lengths, self.root), self.stages)

    def _lengths(self, params: Params, positions: int | None) -> SequenceLengths:
        """Lengths of the workspace's data, else of the files that settings name, else by their
        limits, as for a model of another file, whose tokenizer is not known.
        """
        if self.config is not None:
            return lengths_from_limits(params, positions)
        lengths = None
        if same_data(load_params(self.root), params):
            lengths = lengths_of_workspace(self.root, params, positions)
        if lengths is None and self.supply.lengths is not None:
            lengths = lengths_of_rows(self.supply.lengths, params, positions)
        return lengths or lengths_from_limits(params, positions)

    def sections(
        self, plans: Sequence[StagePlan], *, on_gpus: bool = False, probe: bool = True
    ) -> list[Section]:
        """What else there is to say: what the pairs of the workspace are enough for, whether the
        stages fit this machine, and how long they take, on GPUs by projection or on this machine as
        tried.

        Args:
            on_gpus: Project the time on GPUs.
            probe: Try passes on this machine, where the plan is not for a GPU of known memory.
        """
        found: list[Section] = []
        inputs = plans[0].inputs
        params = inputs.params
        pairs, refusal = self.supply.pairs, self.supply.refusal
        if refusal:
            found.append(("data", refusal, {"conclusion": refusal, "is_refused": True}))
        if pairs is not None:
            found.append(("pairs", as_text(pairs), pairs.as_dict()))
        if inputs.limit is None:
            here = replace(inputs, memory=memory_here())
            line = memory_line([replace(plan, inputs=here) for plan in plans])
            if line is not None:
                found.append(("memory", lines_text({"memory": line}), line.as_dict()))
        if on_gpus:
            found.append(self._time_on_gpus(inputs, data_shape(params, self.supply)))
        elif probe and inputs.limit is None and not self.config:
            hours = hours_of_run(self.root, params, self.supply)
            if hours is not None:
                found.append((HOURS, lines_text({HOURS: hours}), hours.as_dict()))
        return found

    def _time_on_gpus(self, inputs: EstimateInputs, data: DataShape | None) -> Section:
        params, lengths = inputs.params, inputs.lengths
        source = "the mean lengths of a sample of the data"
        if data is None or self.prompt_tokens is not None:
            source = f"full length, by {lengths.source}"
            data = DataShape(lengths.prompt, params.ppo.max_new_tokens, lengths.ptx.width)
        working = working_stages(params)
        stages = [name for name in working if name in self.stages] if self.stages else working
        device = h100(params)
        found = stage_times(params, inputs.architecture, data, stages, device)
        document = {one.stage: one.as_dict() for one in found}
        return "time", times_text(found, device, source), document

    def answer(self, check: bool, *, on_gpus: bool, probe: bool, as_json: bool) -> tuple[str, bool]:
        """What ``rlhf plan`` prints, and whether nothing is known against a run.

        Args:
            check: Only :meth:`check`.
            on_gpus: See :meth:`sections`, as for ``probe``.
            as_json: See :func:`describe`.
        """
        if check:
            return self.check(), True
        plans = self.plans()
        sections = self.sections(plans, on_gpus=on_gpus, probe=probe)
        is_refused = any(document.get("is_refused") for _, _, document in sections)
        is_possible = all(plan.fits for plan in plans) and not is_refused
        return describe(plans, sections, as_json=as_json), is_possible

    def check(self) -> str:
        """One line that says that the stages fit, or that nothing is known against it;
        ``MemoryExceeded`` when not.

        Only what is known to be too large is refused: a stage that runs no model, a GPU of unknown
        memory or a model of unknown sizes passes.
        """
        params = self.params
        stages = [stage for stage in self.stages if stage in planned_stages(params)]
        if self.stages and not stages:
            return f"not checked: no memory is planned for {', '.join(self.stages)}"
        if params.plan.gpu_memory_gb is None:
            return "not checked: plan.gpu_memory_gb is not set"
        try:
            plans = replace(self, stages=stages).plans()
        except ConfigError:
            raise
        except RlhfError as error:  # of an unknown model, or adapters without the package for them
            return f"not checked: {error}"
        if not all(plan.fits for plan in plans):
            raise MemoryExceeded(refusal_line(worst(plans)))
        share = worst(plans).peak / (plans[0].inputs.limit or 1)
        return f"{', '.join(plan.stage for plan in plans)}: {share:.0%} of what tensors may take of a GPU"


def same_data(own: Params, asked: Params) -> bool:
    """Whether two settings read the same rows and count them by the same tokenizer."""
    sizes = {"source", "revision", "vocab_size", "max_positions"}
    if own.base.model_dump(include=sizes) != asked.base.model_dump(include=sizes):
        return False
    return (own.seed, own.collect, own.validate_) == (asked.seed, asked.collect, asked.validate_)


def worst(plans: Sequence[StagePlan]) -> StagePlan:
    """The stage with the highest peak."""
    return max(plans, key=lambda plan: plan.peak)


def describe(
    plans: Sequence[StagePlan], sections: Sequence[Section] = (), *, as_json: bool = False
) -> str:
    """The whole plan with advice, ranks that have no rows, and further parts, as text or as JSON."""
    advice = advise_all(plans)
    idle = steps_short_of_rows(plans[0].inputs.params)
    if as_json:
        document = plan_json(plans, advice) | {"ranks_without_rows": idle}
        return json.dumps(document | {key: values for key, _, values in sections}, indent=2)
    parts = [plan_text(plans, advice), *(text for _, text, _ in sections)]
    return "\n\n".join([*parts, *(["\n".join(idle)] if idle else [])])


def plan_text(plans: Sequence[StagePlan], advice: Advice) -> str:
    """Roles and phases of every stage, the peak against the limit, and what to change."""
    inputs, largest, limit = plans[0].inputs, worst(plans), plans[0].inputs.limit
    lengths, config = inputs.lengths, inputs.architecture.config()
    heading = (
        f"model   {_policy_parameters(inputs) / 1e6:.1f} M parameters in {planned_precision(inputs.params)}: "
        f"{depth_of(config)} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size}"
        f"{', tied' if config.tie_word_embeddings else ''}\n"
        f"tokens  prompt {lengths.prompt} + reply {inputs.params.ppo.max_new_tokens}, SFT "
        f"{lengths.demonstrations.width}, pairs {lengths.pairs.width}, ptx {lengths.ptx.width}\n"
        f"        from {lengths.source}"
    )
    each = " per GPU" if largest.on_gpu else " of tensors"
    verdict = f"peak {gib(largest.peak)}{each}: {largest.stage}, {largest.worst_phase}."
    if limit is None:
        of_what = "it fits" if largest.on_gpu else "a GPU of that memory would do"
        verdict += f"\nGive --gpu-memory (GiB) to learn whether {of_what}"
    else:
        share = (
            f"{largest.peak / limit:.0%} of the {gib(limit)} that tensors may take"
            if limit
            else "no room is left"
        )
        verdict += (
            f" It {'fits' if largest.fits else 'DOES NOT FIT'}: {share} of {_gpu_memory(inputs)}"
        )
    if together := too_large_together(plans):
        verdict += f"\n{together}"
    shared, own = _shared_advice(advice)
    changes = [shared] if shared else []
    changes += [_advice_text(stage, steps, bool(shared)) for stage, steps in own.items()]
    return "\n\n".join([heading, *map(_stage_text, plans), verdict, *changes])


def too_large_together(plans: Sequence[StagePlan]) -> str:
    """Say which stages run at once and do not fit a GPU together; empty where none do, or they fit."""
    limit = plans[0].inputs.limit
    if limit is None:
        return ""
    for group in stages_at_once([plan for plan in plans if plan.fits] or plans[:1]):
        if len(group) > 1 and needed_by(group) > limit:
            names = " and ".join(plan.stage for plan in group)
            return (
                f"At once {names} need {gib(needed_by(group))}: set flow.parallel to 1, unless they have GPUs of their "
                "own"
            )
    return ""


def refusal_line(plan: StagePlan) -> str:
    """Why a stage does not fit, and the settings with which it would, in one line."""
    reason = (
        f"{plan.stage} does not fit: {gib(plan.peak)} of tensors in '{plan.worst_phase}' on "
        f"{_gpus(plan.layout)} of {_gpu_memory(plan.inputs)}, where {gib(plan.inputs.limit or 0)} may be used"
    )
    steps = advise(plan)
    if not steps or not steps[-1].after.fits:
        return f"{reason}; no setting makes it fit: take {LARGER}"
    return f"{reason}; it would fit with {' '.join(step.assignments for step in steps)} ({gib(steps[-1].after.peak)})"


def plan_json(plans: Sequence[StagePlan], advice: Advice) -> dict[str, Any]:
    """All sizes in bytes."""
    inputs, largest = plans[0].inputs, worst(plans)
    return {
        "fits": largest.fits,
        "peak": largest.peak,
        "limit": inputs.limit,
        "stage": largest.stage,
        "phase": largest.worst_phase,
        "parameters": _policy_parameters(inputs),
        "lengths": inputs.lengths.source,
        "stages": {
            plan.stage: {
                "placement": vars(plan.layout),
                "peak": plan.peak,
                "host": plan.host,
                "process": plan.process,
                "sampler_share": plan.sampler_share,
                "roles": {
                    role.name: _use_json(role.held) | {"parameters": role.parameters}
                    for role in plan.roles
                },
                "phases": {name: _use_json(use) for name, use in plan.phases.items()},
            }
            for plan in plans
        },
        "advice": {
            stage: {
                "fits": bool(steps) and steps[-1].after.fits,
                "steps": [{"changes": step.changes, "peak": step.after.peak} for step in steps],
            }
            for stage, steps in advice.items()
        },
    }


def _policy_parameters(inputs: EstimateInputs) -> int:
    return model_size(
        ModelVariant(inputs.architecture, "causal_lm", planned_precision(inputs.params))
    ).parameters


def _stage_text(plan: StagePlan) -> str:
    """What the stage's models hold and what its phases need, in GiB, or in MiB where that is easier
    to read; and the whole process of a plan for a CPU; and what is left to a server on the GPU."""
    unit, name = (GIB, "GiB") if plan.peak >= GIB else (MIB, "MiB")
    table = Table(f"{name} per GPU" if plan.on_gpu else name, box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")

    def add(title: str, uses: Mapping[str, MemoryUse]) -> None:
        if uses:
            table.add_row(title)
        for name, use in uses.items():
            sizes = [*(getattr(use, kind) for kind in MEMORY_KINDS), use.total]
            # Five characters at most below 10,000: hundreds need no second decimal.
            cells = [
                f"{size / unit:.{2 if size < 99.995 * unit else 1}f}" if size else ""
                for size in sizes
            ]
            table.add_row(f"  {name}", *cells)

    add("held throughout", {role.name: role.held for role in plan.roles})
    marked = {
        f"{name} *" if name == plan.worst_phase else name: use for name, use in plan.phases.items()
    }
    add("at each phase's peak", marked)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        console.print(table, highlight=False)
    lines = [
        f"{plan.stage} on {_layout_text(plan)}",
        *map(str.rstrip, capture.get().splitlines()),
    ]
    if plan.host:
        lines.append(f"and {gib(plan.host)} of host memory for each GPU")
    if plan.process is not None:
        parts = "; ".join(f"{part} {gib(size)}" for part, size in plan.process_parts.items())
        lines += [f"the whole process: {gib(plan.process)}", f"  {parts}"]
    if plan.sampler_share is not None:  # as the server's own option
        share = int(plan.sampler_share * 100) / 100
        lines.append(f"vLLM on the same GPU: at most --gpu-memory-utilization {share}")
    return "\n".join(lines)


def _shared_advice(advice: Advice) -> tuple[str, Advice]:
    """What is advised for several stages at once, and what is left for each of them; nothing where
    only one does not fit.
    """
    firsts = {
        stage: steps[0]
        for stage, steps in advice.items()
        if steps and set(steps[0].changes) <= {*SHARED}
    }
    if len(firsts) < 2:
        return "", advice
    text = f"for all stages: {next(iter(firsts.values())).assignments}"
    fitting = [
        f"{stage} ({gib(step.after.peak)})" for stage, step in firsts.items() if step.after.fits
    ]
    if fitting:
        text += f"; so fit {', '.join(fitting)}"
    left: dict[str, Sequence[AdviceStep]] = {}
    for stage, steps in advice.items():
        rest = steps[1:] if stage in firsts else steps
        if rest or stage not in firsts or not firsts[stage].after.fits:
            left[stage] = rest
    return text, left


def _advice_text(stage: str, steps: Sequence[AdviceStep], after_shared: bool = False) -> str:
    if not steps:
        return f"{stage}: no {'other ' if after_shared else ''}setting helps; take {LARGER}"
    others = "with that, and " if after_shared else ""
    lines = [f"to make {stage} fit, {others}each with those before it:"]
    for number, step in enumerate(steps, 1):
        lines.append(
            f"  {number}. {step.assignments}: {gib(step.after.peak)} ({step.after.worst_phase})"
        )
    lines.append("  so it fits" if steps[-1].after.fits else f"  that is not enough: {LARGER}")
    return "\n".join(lines)


def _layout_text(plan: StagePlan) -> str:
    layout = plan.layout
    offloaded = {"optimiser": layout.offload_optimizer, "parameters": layout.offload_parameters}
    away = " and ".join(what for what, offloads in offloaded.items() if offloads)
    options = [
        _gpus(layout) if plan.on_gpu else "this machine's CPU",
        "plain torch" if layout.engine == "local" else f"DeepSpeed ZeRO {layout.zero}",
        "gradient checkpointing" if layout.gradient_checkpointing else "",
        f"{away} offloaded" if away else "",
        {"device": "", "offload": "frozen models offloaded", "sharded": "frozen models sharded"}[
            layout.frozen
        ],
    ]
    return ", ".join(filter(None, options))


def _gpus(layout: ParallelLayout) -> str:
    return "1 GPU" if layout.gpus == 1 else f"{layout.gpus} GPUs"


def _gpu_memory(inputs: EstimateInputs) -> str:
    return f"{inputs.params.plan.gpu_memory_gb:g} GiB"


def _use_json(use: MemoryUse) -> dict[str, int]:
    return {**vars(use), "total": use.total}

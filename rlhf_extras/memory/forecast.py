"""The line of memory before a run starts: whether its stages fit this machine, and else what would.

``rlhf init``, ``rlhf doctor`` and ``rlhf data validate`` ask for it by the door of forecasts,
``rlhf plan`` has planned already; all say it in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlhf_core.config.base import is_pretrained
from rlhf_core.config.params import Params
from rlhf_core.errors import RlhfError
from rlhf_core.models.architecture import positions_of
from rlhf_core.runtime import distributed
from rlhf_core.runtime.machine import available_memory, total_memory
from rlhf_core.stages.pair_supply import DataSupply
from rlhf_core.stages.run_forecasts import ForecastLine
from rlhf_core.stages.token_lengths import local_starting_model
from rlhf_extras.memory.advice import Changes, advise_all, as_assignments
from rlhf_extras.memory.architecture import (
    PUBLISHED_CONFIGS,
    Architecture,
    starting_architecture,
)
from rlhf_extras.memory.sequence_lengths import lengths_from_limits, lengths_of_rows
from rlhf_extras.memory.sharding import gib
from rlhf_extras.memory.stage_plan import EstimateInputs, StagePlan
from rlhf_extras.memory.stages import plan_stage, plan_stages
from rlhf_extras.memory.workload import PAIRED

CONFIG = "config.json"
ONE_AT_A_TIME = {"flow.parallel": 1}


def memory_of_run(folder: Path, params: Params, supply: DataSupply) -> ForecastLine | None:
    """Say whether the stages of a run fit this machine, or the GPU that settings name.

    Args:
        folder: Where a relative path of the starting model starts.
        params: The settings.
        supply: What is known of the data.

    Returns:
        None where the starting model's sizes are not here.
    """
    try:
        architecture = _architecture_here(folder, params)
        if architecture is None:
            return None
        positions = positions_of(architecture.config())
        lengths = lengths_from_limits(params, positions)
        if supply.lengths is not None:
            lengths = lengths_of_rows(supply.lengths, params, positions)
        inputs = EstimateInputs(params, architecture, lengths, folder, memory_here())
        return memory_line(plan_stages(inputs))
    except RlhfError as error:
        return ForecastLine(f"not known: {error}")


def _architecture_here(folder: Path, params: Params) -> Architecture | None:
    """The starting model's architecture without asking the hub; None where that would be needed."""
    source = params.base.source
    here = local_starting_model(params, folder)
    if here is None:
        is_known = not is_pretrained(source) or source in PUBLISHED_CONFIGS
        return starting_architecture(params.base, folder) if is_known else None
    place = Path(here).expanduser()
    file = folder / place / CONFIG
    if (folder / place).is_dir() and not file.is_file():
        return None  # a tokenizer alone, by which rows are counted
    if here != source:  # a copy in the hub's cache
        return starting_architecture(params.base, folder, file)
    return starting_architecture(params.base, folder)


def memory_here() -> int:
    """Bytes that this machine's GPU has, or that its memory has left where there is none."""
    device = distributed.device()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()


def stages_at_once(plans: Sequence[StagePlan]) -> list[list[StagePlan]]:
    """Return each stage alone, and the sets of them that ``flow.parallel`` runs at the same time."""
    groups = [[plan] for plan in plans]
    at_once = plans[0].inputs.params.flow.parallel
    if at_once == 1:
        return groups
    by_name = {plan.stage: plan for plan in plans}
    # The judge trains beside whatever comes between the reward models and the evaluation.
    for names in (PAIRED[:at_once], ("judge", "critic"), ("judge", "ppo")):
        if all(name in by_name for name in names):
            groups.append([by_name[name] for name in names])
    return groups


def needed_by(group: Sequence[StagePlan]) -> int:
    """Bytes of stages that run at the same time."""
    return sum(plan.needed for plan in group)


def memory_line(plans: Sequence[StagePlan]) -> ForecastLine | None:
    """Set what the stages need beside what there is.

    Returns:
        None where it is not known what there is, as for a job of several GPUs that are not here.
    """
    inputs = plans[0].inputs
    known = [plan for plan in plans if inputs.limit is not None or _runs_here(plan)]
    if not known or inputs.memory is None:
        return None
    largest = max(stages_at_once(known), key=needed_by)
    names = " and ".join(plan.stage for plan in largest)
    several = len(largest) > 1
    subject = f"{names} at once" if several else names
    needed, room = needed_by(largest), _room(largest[0])
    fits = needed <= room
    details = {
        "fits": fits,
        "stages": [plan.stage for plan in largest],
        "needed": needed,
        "available": room,
        "lengths": inputs.lengths.source,
    }
    place = _place(largest[0], room)
    bound = f", by {inputs.lengths.source}" if inputs.lengths.is_bound else ""
    if fits:
        verb = "take" if several else "takes"
        about = "at most" if bound else "about"
        text = f"{subject} {verb} most: {about} {gib(needed)}{bound} of {place}"
        return ForecastLine(text, details=details)
    verb = "need" if several else "needs"
    if bound:
        text = (
            f"not known: {subject} {verb} at most {gib(needed)}{bound}, more than {place}; rows are counted where they "
            "and the model's tokenizer are"
        )
        return ForecastLine(text, details=details | {"fits": None})
    text = f"{subject} {verb} about {gib(needed)}, more than {place}"
    return ForecastLine(text, _remedy(known, needed), details)


def _runs_here(plan: StagePlan) -> bool:
    """Whether a stage computes with the memory of this machine, as far as settings tell."""
    placement = plan.inputs.params.pools.get(plan.stage)
    if placement is not None and (not placement.shared or placement.nodes or placement.sbatch):
        return False
    return plan.process is not None or distributed.device().type == "cuda"


def _room(plan: StagePlan) -> int:
    """Bytes that there are for what ``StagePlan.needed`` counts."""
    if plan.process is None:
        return plan.limit or 0
    return plan.inputs.memory or 0


def _place(plan: StagePlan, room: int) -> str:
    named = plan.inputs.params.plan.gpu_memory_gb
    if plan.process is not None:
        return f"the {gib(room)} of memory available here"
    gpu = "this machine's GPU" if named is None else f"a GPU of {named:g} GiB"
    return f"the {gib(room)} that tensors may take of {gpu}"


def _remedy(plans: Sequence[StagePlan], needed: int) -> str:
    """What to do where stages do not fit: the settings that were advised, tried together."""
    remedies = []
    if plans[0].process is not None and needed <= total_memory():
        remedies.append("close other programs")
    changes: Changes = {}
    for steps in advise_all(plans).values():
        for step in steps:
            changes |= step.changes
    after = list(plans)
    if changes:
        inputs = plans[0].inputs.with_changes(changes)
        after = [plan_stage(inputs, plan.stage) for plan in plans]
    if any(needed_by(group) > _room(group[0]) for group in stages_at_once(after)):
        changes |= ONE_AT_A_TIME
        one_at_a_time = after[0].inputs.with_changes(ONE_AT_A_TIME)
        after = [replace(plan, inputs=one_at_a_time) for plan in after]
    if all(plan.fits for plan in after):
        most = max(map(needed_by, stages_at_once(after)))
        remedies.append(f"set {as_assignments(changes)} (then about {gib(most)})")
    else:
        remedies.append("take a smaller model or more memory: no setting makes it fit")
    return ", or ".join(remedies)

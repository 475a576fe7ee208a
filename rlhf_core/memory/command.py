"""``rlhf plan``: from a recipe and the command line's options to a plan, and to what is printed of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_core.config.loading import yaml_text
from rlhf_core.config.loading.load import PARAMS_FILE, Params, check_params, load_params
from rlhf_core.config.loading.overlay import merge, profile_text
from rlhf_core.config.loading.recipe import profiles_of, recipe_folder
from rlhf_core.errors import ModelError, RlhfError
from rlhf_core.memory.advice import advise
from rlhf_core.memory.assign import assigned
from rlhf_core.memory.estimate import STAGES, Plan, make_plan
from rlhf_core.memory.lengths import lengths_from_limits
from rlhf_core.memory.options import Options
from rlhf_core.memory.setting import Recipe
from rlhf_core.memory.shape_sources import starting_shape
from rlhf_core.memory.table import as_json, one_line, text
from rlhf_core.stages.runtime.runner import workspace_root


class MemoryExceeded(RlhfError):
    """A stage cannot fit the GPUs that it is meant for."""


@dataclass(frozen=True)
class Request:
    """``root`` is a workspace or the project's own recipe; ``options`` are those of the command line, None where not
    given; ``config`` a config.json in place of the starting model's."""

    root: Path
    profile: str | None = None
    sets: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    stages: Sequence[str] = ()
    config: Path | None = None


def recipe_root(given: Path | None) -> Path:
    """The workspace that ``given`` or the current folder lies in, else the project's own recipe."""
    try:
        return workspace_root(given)
    except RlhfError:
        if given is not None:
            raise
        return recipe_folder()


def plan_of(request: Request) -> Plan:
    """Estimate what ``request`` asks for. Lengths come from the workspace's data, unless a profile or override may
    have changed what that data would be."""
    params = _params(request)
    shape = starting_shape(params.base, request.root, request.config)
    lengths = lengths_from_limits(params, shape.positions)
    if not (request.profile or request.sets or request.config):
        from rlhf_core.memory.measured_lengths import lengths_of_workspace

        lengths = lengths_of_workspace(request.root, params, shape.positions) or lengths
    return make_plan(Recipe(params, shape, lengths, request.root), request.stages or tuple(STAGES))


def describe(plan: Plan, *, as_json_text: bool = False, dry_run: bool = False) -> str:
    """The whole plan with its advice, as a table or as JSON, and what a dry run counted."""
    advice = advise(plan)
    run = _dry_run(plan) if dry_run else None
    if as_json_text:
        document = as_json(plan, advice) | ({"dry_run": run.as_json()} if run else {})
        return json.dumps(document, indent=2)
    return "\n\n".join([text(plan, advice), *([run.text()] if run else [])])


def check(request: Request) -> str:
    """One line that says that the stages fit, or that nothing is known against it; ``MemoryExceeded`` when they do not.

    Only what is known to be too large is refused: a stage that trains nothing, a GPU of unknown memory or a model of
    unknown shape passes.
    """
    stages = [stage for stage in request.stages if stage in STAGES]
    if request.stages and not stages:
        return f"not checked: no memory is planned for {', '.join(request.stages)}"
    try:
        plan = plan_of(replace(request, stages=stages))
    except ModelError as error:
        return f"not checked: {error}"
    if plan.limit is None:
        return "not checked: plan.gpu_memory_gb is not set"
    if not plan.fits:
        raise MemoryExceeded(one_line(plan, advise(plan)))
    names = ", ".join(stage.stage for stage in plan.stages)
    return f"{names}: {plan.peak / plan.limit:.0%} of what tensors may take of a GPU"


def _params(request: Request) -> Params:
    params = load_params(request.root)
    if request.profile or request.sets:
        overlays = []
        if request.profile:
            overlays.append((f"profile {request.profile}", profile_text(profiles_of(request.root), request.profile)))
        recipe = merge((request.root / PARAMS_FILE).read_text(encoding="utf-8"), overlays, request.sets)
        params = check_params(yaml_text.parse(recipe, "parameters"), "parameters")
    return assigned(params, request.options.settings(request.stages or tuple(STAGES)))


def _dry_run(plan: Plan) -> Any:
    from rlhf_core.memory.dry_run import dry_run
    from rlhf_core.models.io import quiet

    with quiet():
        return dry_run(plan.recipe)

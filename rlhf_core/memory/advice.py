"""What to change when a stage does not fit: settings tried one after another, those that cost least first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.config.loading.load import Params
from rlhf_core.errors import ConfigError
from rlhf_core.memory.assign import assigned
from rlhf_core.memory.estimate import STAGES, Plan
from rlhf_core.memory.setting import Recipe, StagePlan
from rlhf_core.memory.trials import KINDS

# A change that takes away less than this share of a phase's peak is not worth advising.
WORTHWHILE = 0.02


@dataclass(frozen=True)
class Step:
    """``changes`` are settings by path, and ``after`` the stage with them and those of every step before."""

    changes: dict[str, Any]
    after: StagePlan

    @property
    def words(self) -> str:
        """As ``--set`` takes them."""
        return " ".join(f"{path}={_yaml(value)}" for path, value in self.changes.items())


@dataclass(frozen=True)
class Advice:
    """What to change for one stage. ``fits``: the last step does."""

    stage: str
    steps: tuple[Step, ...]
    fits: bool


def advise(plan: Plan) -> tuple[Advice, ...]:
    """For every stage that does not fit, the settings that make it fit, or come nearest.

    Smaller batches of sampling and of passes change no result; gradient checkpointing costs time; sharding and
    offloading cost communication; adapters and smaller optimiser steps change what is learned and come last. A change
    that turns out not to lower the peak, or not to be needed, is left out again, dear ones first.
    """
    limit = plan.limit
    if limit is None:
        return ()
    return tuple(_for_stage(plan.recipe, stage, limit) for stage in plan.stages if stage.peak.use.total > limit)


def _for_stage(recipe: Recipe, stage: StagePlan, limit: int) -> Advice:
    taken: list[dict[str, Any]] = []
    current, params = stage, recipe.params
    for kind in KINDS:
        while current.peak.use.total > limit:
            found = _first_that_helps(recipe, params, current, limit, kind(params, stage.stage))
            if found is None:
                break
            params, current, changes = found
            taken.append(changes)
    reached = current.peak.use.total
    needed = _needed(recipe, stage.stage, max(limit, reached), taken)
    return Advice(stage.stage, tuple(_steps(recipe, stage.stage, needed)), reached <= limit)


def _first_that_helps(
    recipe: Recipe, params: Params, current: StagePlan, limit: int, trials: Iterator[dict[str, Any]]
) -> tuple[Params, StagePlan, dict[str, Any]] | None:
    for changes in trials:
        after = _planned(recipe, params, current.stage, changes)
        if after is not None and _helps(current, after[1], limit):
            return (*after, changes)
    return None


def _planned(recipe: Recipe, params: Params, stage: str, changes: dict[str, Any]) -> tuple[Params, StagePlan] | None:
    """The stage with ``changes``; None where they contradict other settings."""
    try:
        changed = assigned(params, changes)
    except ConfigError:
        return None
    return changed, STAGES[stage](replace(recipe, params=changed).setting(stage))


def _helps(before: StagePlan, after: StagePlan, limit: int) -> bool:
    """Whether a phase that is too large becomes smaller, and none of those larger."""
    uses = {phase.name: phase.use.total for phase in after.phases}
    pairs = [(phase.use.total, uses.get(phase.name, 0)) for phase in before.phases if phase.use.total > limit]
    return any(new <= old * (1 - WORTHWHILE) for old, new in pairs) and all(new <= old for old, new in pairs)


def _needed(recipe: Recipe, stage: str, goal: int, taken: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``taken`` without what the peak keeps to ``goal`` without. Of repeated changes to the same settings the last one
    stands."""
    kept = list({tuple(changes): changes for changes in taken}.values())
    for changes in reversed(kept):
        rest = [other for other in kept if other is not changes]
        found = _planned(recipe, recipe.params, stage, {})
        for other in rest:
            found = _planned(recipe, found[0], stage, other) if found is not None else None
        if found is not None and found[1].peak.use.total <= goal:
            kept = rest
    return kept


def _steps(recipe: Recipe, stage: str, taken: Sequence[dict[str, Any]]) -> Iterator[Step]:
    params = recipe.params
    for changes in taken:
        planned = _planned(recipe, params, stage, changes)
        assert planned is not None, "it was tried before"
        params = planned[0]
        yield Step(changes, planned[1])


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""What can be known before a run computes: that nothing changed, or that a stage would fail."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flows.dvc_repo.graph import StageNode, dvc_status, read_graph
from flows.pipeline.events import (
    COMPLETED,
    EventLog,
    RegistryUpdated,
    RunEnded,
    RunPlanned,
    StageEnded,
    VerdictReached,
)
from flows.pipeline.verdict import RegistrationResult, RunVerdict, reach_verdict
from flows.registry.client import has_record
from flows.registry.promote import promote
from flows.registry.register import register
from flows.stage import StageOutcome
from flows.supervision.processes import run_module
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.errors import EXIT_USER_ERROR, RlhfError

SCRATCH, BASE = "scratch", "base"


def open_starting_model(workspace: Path, params: Params) -> str:
    """Open the model that the stage ``base`` will load, and return what is said of it.

    Nothing is opened for a model made from nothing, where ``base`` is up to date, or where it runs
    on another host.

    Raises:
        RlhfError: ``base`` would refuse the model.
    """
    placement = params.pools.get(BASE)
    if params.base.source == SCRATCH or (placement is not None and not placement.shared):
        return ""
    if (workspace / "models" / BASE).is_dir() and is_up_to_date(workspace, BASE):
        return ""
    result = run_module(workspace, "flows.cli", "open-model", "--workspace", str(workspace))
    if result.exit_code == EXIT_USER_ERROR:
        raise RlhfError(result.error_line.removeprefix("rlhf: "))
    return result.stdout.strip()


def pairs_refusal(workspace: Path, stage: str) -> StageOutcome | None:
    """Return a failed outcome where pairs or adapters will not do for the reward models.

    That is asked before SFT, the first stage to take long, of data from files and of adapters,
    unless SFT is up to date.
    """
    if stage != "sft" or not (workspace / "models" / BASE).is_dir():
        return None
    params = load_params(workspace)
    if (params.collect.source == "world" and not params.later_adapters) or is_up_to_date(
        workspace, stage
    ):
        return None
    return _refusal(workspace, stage, "check-pairs")


def memory_refusal(workspace: Path, stage: str) -> StageOutcome | None:
    """Return a failed outcome if ``rlhf plan --check`` finds the stage too large for its pool.

    Nothing is checked where ``plan.gpu_memory_gb`` is not set, and a stage that is up to date is
    never refused.
    """
    # DVC's answer takes half a second, the plan ten.
    if load_params(workspace).plan.gpu_memory_gb is None or is_up_to_date(workspace, stage):
        return None
    return _refusal(workspace, stage, "plan", "--check", "--stage", stage)


def _refusal(workspace: Path, stage: str, *command: str) -> StageOutcome | None:
    """Return a failed outcome where a command of this package reports a user's mistake."""
    started = time.time()
    result = run_module(workspace, "flows.cli", *command, "--workspace", str(workspace))
    if result.exit_code != EXIT_USER_ERROR:
        return None
    message = result.error_line.removeprefix("rlhf: ")
    return StageOutcome.failed(stage, message, EXIT_USER_ERROR, started=started)


def is_up_to_date(workspace: Path, stage: str) -> bool:
    """Whether DVC finds a stage up to date; False where DVC cannot tell."""
    try:
        return not dvc_status(workspace, [stage])
    except RlhfError:
        return False


POLICY_EVIDENCE = "gates/policy.json"


@dataclass(frozen=True)
class UnchangedWorld:
    """What a run would have ended with; ``message`` says so in one line."""

    outcomes: Mapping[str, StageOutcome]
    verdict: RunVerdict
    message: str

    def emit(self, events: EventLog) -> None:
        """Write the events of a run in which every stage was up to date."""
        events.emit(RunPlanned(tuple(self.outcomes)))
        for outcome in self.outcomes.values():
            events.emit(StageEnded(outcome))
        events.emit(RegistryUpdated(self.verdict.registered))
        events.emit(VerdictReached(self.verdict))
        events.emit(RunEnded(COMPLETED, self.message))


def has_gated_policy(graph: Mapping[str, StageNode]) -> bool:
    """Whether a pipeline judges a policy: only such a one registers models."""
    return any(POLICY_EVIDENCE in node.outputs for node in graph.values())


def find_unchanged(workspace: Path, *, promotes: bool) -> UnchangedWorld | None:
    """Say what a run would end with that has nothing to do; None if there is something.

    The page of the release is brought up to date. Where DVC or the registry do not answer, the run
    itself says so: that is None too.

    Args:
        promotes: Whether the run would promote.
    """
    if not has_record(workspace) or not (workspace / "dvc.lock").is_file():
        return None
    try:
        graph = read_graph(workspace)
        if not has_gated_policy(graph) or dvc_status(workspace):
            return None
        registration = _standing_registration(workspace, promotes)
    except RlhfError:
        return None
    if registration is None:
        return None
    now = time.time()
    outcomes = {name: StageOutcome(name, "cached", started=now, ended=now) for name in graph}
    verdict, _ = reach_verdict(workspace, outcomes, registration)
    message = (
        f"nothing to do: every stage is up to date, {registration.registered}; {verdict.promotion}"
    )
    return UnchangedWorld(outcomes, verdict, message)


def _standing_registration(workspace: Path, promotes: bool) -> RegistrationResult | None:
    """The registration and decision that a run would find, None if it would make others."""
    config = load_params(workspace).registry
    registration = register(workspace, known_only=True)
    described = registration.describe()
    version = registration.challenger(config.policy)
    if version is None:
        return RegistrationResult(described)
    if because := undecided_because(promotes, config.auto_promote):
        return RegistrationResult(described, undecided_because=because)
    decision = promote(workspace, version=version, dry_run=True, play=_no_match)
    return RegistrationResult(described, decision) if decision.unchanged else None


def undecided_because(promotes: bool, auto_promote: bool) -> str:
    """Why a run does not promote, empty if it does."""
    if not promotes:
        return "the run was started with --no-promote"
    return "" if auto_promote else "registry.auto_promote is off"


def _no_match(workspace: Path, champion: Path, challenger: Path, prompt_set: int) -> NoReturn:
    raise RlhfError("the challenger has to play the champion")

"""A run that has nothing to do: stages up to date, models registered, nothing to decide. It opens no run in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flows.dvc_repo.graph import StageNode, dvc_status, read_graph
from flows.pipeline.events import EventWriter, RegistryUpdated, RunEnded, RunPlanned, StageEnded, VerdictReached
from flows.pipeline.last_run import COMPLETED
from flows.pipeline.release_page import with_release_page
from flows.pipeline.verdict import RegistrationResult, RunVerdict, reach_verdict
from flows.registry.client import has_record
from flows.registry.promote import promote
from flows.registry.register import registered_before
from flows.stage.outcome import StageOutcome
from rlhf_core.config.loading.load import load_params
from rlhf_core.errors import RlhfError

POLICY_EVIDENCE = "gates/policy.json"


@dataclass(frozen=True)
class UnchangedWorld:
    """What a run would have ended with; ``message`` says so in one line."""

    outcomes: Mapping[str, StageOutcome]
    registered: str
    verdict: RunVerdict
    message: str

    def emit(self, events: EventWriter) -> None:
        """Write the events of a run in which every stage was up to date."""
        events.emit(RunPlanned(tuple(self.outcomes)))
        for outcome in self.outcomes.values():
            events.emit(StageEnded(outcome))
        events.emit(RegistryUpdated(self.registered))
        events.emit(VerdictReached(self.verdict))
        events.emit(RunEnded(COMPLETED, self.message))


class _MatchNeeded(RlhfError):
    """The challenger has not met the present champion on these prompts."""


def has_gated_policy(graph: Mapping[str, StageNode]) -> bool:
    """Whether a pipeline judges a policy: only such a one is recorded in MLflow and registers models."""
    return any(POLICY_EVIDENCE in node.outputs for node in graph.values())


def find_unchanged(workspace: Path, *, promotes: bool) -> UnchangedWorld | None:
    """Say what a run would end with that computes, registers and decides nothing; None if there is something to do.

    The page of the release is brought up to date. Where DVC or the registry do not answer, the run itself says so: that
    is None too.

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
    outcomes = {name: StageOutcome.cached(name, now, now) for name in graph}
    verdict, _ = with_release_page(workspace, reach_verdict(workspace, outcomes, registration), registration)
    message = f"nothing to do: every stage is up to date, {registration.registered}; {verdict.promotion}"
    return UnchangedWorld(outcomes, registration.registered, verdict, message)


def _standing_registration(workspace: Path, promotes: bool) -> RegistrationResult | None:
    """The registration and the decision that a run would find made before, None if it would make another."""
    config = load_params(workspace).registry
    registration = registered_before(workspace)
    if registration is None:
        return None
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
    raise _MatchNeeded("the challenger has to play the champion")

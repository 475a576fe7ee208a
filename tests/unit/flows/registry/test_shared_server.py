"""Several workspaces on one MLflow server: what a run promotes and what a status shows is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.commands.status import recorded_run
from flows.pipeline import registration
from flows.registry.client import end_pipeline_run, start_pipeline_run

from .conftest import Registry, ScriptedMatch


def test_a_run_promotes_the_version_that_it_registered(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = registry.aliases()["challenger"]
    registry.add_version()  # another workspace registers before this run promotes
    monkeypatch.setitem(registration.promote.__kwdefaults__, "play", ScriptedMatch())
    decision = registration.promote_task.fn(contest, own)
    assert (decision.challenger, decision.promoted) == (own, True)
    assert registry.aliases()["champion"] == own


def test_status_shows_no_run_of_a_workspace_elsewhere_with_the_same_name(registry: Registry) -> None:
    here, elsewhere = registry.workspace("here/demo"), registry.workspace("elsewhere/demo")
    start_pipeline_run(elsewhere, "demo · elsewhere")
    assert recorded_run(here, "rlhf-pipeline", False, None) == []
    own = start_pipeline_run(here, "demo · here")
    end_pipeline_run(start_pipeline_run(elsewhere, "demo · again"), "completed", elsewhere)
    assert own in recorded_run(here, "rlhf-pipeline", False, None)[0]

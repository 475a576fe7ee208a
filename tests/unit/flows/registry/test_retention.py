"""Retention keeps what an alias, a rollback or an approval needs, and deletes nothing before it was
asked to.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flows.commands.doctor import workspace_checks
from flows.registry import orphans
from flows.registry.client import experiment_id
from flows.registry.history import read_history
from flows.registry.promote import MATCHES, approve, promote, rollback
from rlhf_core.errors import RlhfError
from rlhf_core.tracking.origin import workspace_tags
from rlhf_core.tracking.pipeline_run import (
    EXPERIMENT_TAG,
    PARENT_TAG,
    PIPELINE_TAG,
    PROCESS_TAG,
    named_process,
)
from rlhf_extras.retention.retention import apply_retention

from .conftest import MODEL, PARAMS, Registry, ScriptedMatch

KEEP_ONE = PARAMS + "registry: {approval: true, retention: {versions: 1}}\n"
REWARD = "rlhf-reward-model"


@pytest.fixture
def long_registry(registry: Registry) -> Path:
    """Versions 1 and 2 have been champion, 3 lost, 4 was rolled back, 5 lost; each has a reward
    model of its number.
    """
    owner = registry.workspace("owner")
    wins, loses = ScriptedMatch(0.6), ScriptedMatch(0.4)
    for match in (wins, wins, loses, wins, loses):
        reward = registry.add_version(REWARD)
        registry.add_version(reward_model_version=reward)
        promote(owner, play=match)
        if registry.aliases()["champion"] == "4":
            rollback(owner, "rude")
    registry.add_version(REWARD)
    registry.client.delete_registered_model_alias(REWARD, "challenger")
    assert registry.aliases() == {"champion": "2", "previous": "1", "challenger": "5"}
    (owner / "params.yaml").write_text(KEEP_ONE)
    return owner


def numbers(registry: Registry, model: str) -> list[str]:
    return sorted(
        str(version.version) for version in registry.client.search_model_versions(f"name='{model}'")
    )


def matches(workspace: Path) -> int:
    return len(list((workspace / MATCHES).glob("*.json")))


@pytest.mark.slow
def test_without_delete_it_says_what_would_go_and_why_others_stay(
    registry: Registry, long_registry: Path
) -> None:
    registry.client.set_registered_model_alias(MODEL, "audit", "3")
    printed = apply_retention(long_registry, delete=False).describe(done=False).splitlines()
    assert printed == [
        MODEL,
        "  version 5  kept: @challenger",
        "  version 4  would be deleted",
        "  version 3  kept: @audit",
        "  version 2  kept: @champion",
        "  version 1  kept: @previous",
        REWARD,
        "  version 6  kept: one of the newest 1",
        "  version 5  kept: policy version 5 was trained with it",
        "  version 4  would be deleted",
        "  version 3  kept: policy version 3 was trained with it",
        "  version 2  kept: @champion",
        "  version 1  kept: @previous",
        "nothing was deleted; `rlhf registry gc --delete` deletes 2 versions and 1 match",
    ]
    assert numbers(registry, MODEL) == ["1", "2", "3", "4", "5"] and matches(long_registry) == 4


@pytest.mark.slow
def test_what_is_deleted_is_in_the_history_and_a_rollback_still_works(
    registry: Registry, long_registry: Path
) -> None:
    apply_retention(long_registry, delete=True)
    assert numbers(registry, MODEL) == ["1", "2", "5"] and numbers(registry, REWARD) == [
        "1",
        "2",
        "5",
        "6",
    ]
    assert matches(long_registry) == 2, "of versions 2 and 5"
    record = read_history(registry.client, MODEL)[-1]
    assert record["action"] == "gc"
    assert record["reason"] == f"beyond the newest 1 and not needed: {MODEL} 4, 3; {REWARD} 4, 3"
    assert not apply_retention(long_registry, delete=True).deleted
    assert read_history(registry.client, MODEL)[-1] == record
    assert rollback(long_registry, "rude too").champion == "1"


def test_a_reward_model_that_another_policy_was_trained_with_is_kept(
    registry: Registry, long_registry: Path
) -> None:
    registry.client.create_registered_model("of-others")
    registry.client.create_model_version(
        "of-others", "file:///nowhere", tags={"reward_model_version": "4"}
    )
    apply_retention(long_registry, delete=True)
    assert numbers(registry, REWARD) == ["1", "2", "4", "5", "6"] and numbers(
        registry, "of-others"
    ) == ["1"]


@pytest.mark.slow
def test_a_version_that_waits_for_approval_is_kept_for_it(
    registry: Registry, long_registry: Path
) -> None:
    assert promote(long_registry, play=ScriptedMatch(), force_reason="a try").awaiting_approval
    registry.add_version()
    registry.client.set_registered_model_alias(MODEL, "challenger", "5")
    plan = apply_retention(long_registry, delete=True)
    assert plan.models[MODEL][1][1] == "@challenger"
    assert [int(version.version) for version in plan.deleted if version.name == MODEL] == [4, 3]
    approve(long_registry)
    assert registry.aliases()["champion"] == "5"


@pytest.mark.slow
def test_a_deletion_is_completed(
    registry: Registry, long_registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    original = MlflowClient.delete_model_version

    def interrupt(client: MlflowClient, name: str, version: str) -> None:
        if version == "3":
            raise KeyboardInterrupt
        original(client, name, version)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "delete_model_version", interrupt)
        with pytest.raises(KeyboardInterrupt):
            apply_retention(long_registry, delete=True)
    assert numbers(registry, MODEL) == ["1", "2", "3", "5"]
    apply_retention(long_registry, delete=True)
    assert numbers(registry, MODEL) == ["1", "2", "5"] and numbers(registry, REWARD) == [
        "1",
        "2",
        "5",
        "6",
    ]


def test_a_deletion_that_stops_at_a_match_leaves_none_behind(
    registry: Registry, contest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(contest, play=ScriptedMatch(0.4))
    registry.add_version()
    (contest / "params.yaml").write_text(PARAMS + "registry: {retention: {versions: 1}}\n")
    (match,) = apply_retention(contest, delete=False).matches
    unlink = Path.unlink

    def interrupt(path: Path, missing_ok: bool = False) -> None:
        if path == match:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            apply_retention(contest, delete=True)
    apply_retention(contest, delete=True)
    assert numbers(registry, MODEL) == ["1", "3"] and matches(contest) == 0


@pytest.mark.slow
def test_only_the_owner_deletes_and_only_if_a_number_is_set(
    registry: Registry, long_registry: Path
) -> None:
    with pytest.raises(RlhfError, match=r"owned by .*owner; its versions are deleted there"):
        apply_retention(registry.workspace("second", KEEP_ONE), delete=True)
    (long_registry / "params.yaml").write_text(PARAMS)
    with pytest.raises(RlhfError, match=r"registry.retention.versions is not set"):
        apply_retention(long_registry, delete=True)
    assert numbers(registry, MODEL) == ["1", "2", "3", "4", "5"]


@pytest.fixture
def killed_registrations(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose record has what killed registrations leave, and what looks like it."""
    monkeypatch.setattr(orphans, "SECONDS", -60.0)
    owner, client = registry.workspace("owner"), registry.client
    experiment = experiment_id(client, owner)
    for number, name in enumerate(("policy", "reward", "policy", "other")):
        model = client.create_logged_model(experiment, name)
        files = Path(model.artifact_location.removeprefix("file://"))
        files.mkdir(parents=True)
        (files / "weights").write_text(name)
        if number == 2:
            client.create_registered_model(MODEL)
            client.create_model_version(MODEL, f"models:/{model.model_id}", model_id=model.model_id)
    for name, status in (
        ("register a", None),
        ("register b", None),
        ("register c", "FINISHED"),
        ("train", None),
    ):
        run = client.create_run(experiment, run_name=name).info.run_id
        if status is not None:
            client.set_terminated(run, status)
    return owner


def recorded(registry: Registry, workspace: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the logged models whose files are there, and states of the runs."""
    own = experiment_id(registry.client, workspace)
    models = registry.client.search_logged_models([own])
    names = sorted(
        model.name
        for model in models
        if Path(model.artifact_location.removeprefix("file://")).is_dir()
    )
    assert len(names) == len(models)
    return names, {run.info.run_name: run.info.status for run in registry.client.search_runs([own])}


def warned(workspace: Path) -> list[str]:
    return [check.finding for check in workspace_checks(workspace) if check.name == "registry"]


def test_what_killed_registrations_leave_is_named_and_removed(
    registry: Registry, killed_registrations: Path
) -> None:
    before = recorded(registry, killed_registrations)
    left = "killed registrations have left the files of 2 models and 2 open runs"
    assert warned(killed_registrations) == [left]
    plan = apply_retention(killed_registrations, delete=False)
    assert f"{left}: would be deleted and ended" in plan.describe(done=False)
    assert recorded(registry, killed_registrations) == before
    apply_retention(killed_registrations, delete=True)
    states = {
        "register a": "KILLED",
        "register b": "KILLED",
        "register c": "FINISHED",
        "train": "RUNNING",
    }
    assert recorded(registry, killed_registrations) == (["other", "policy"], states)
    assert warned(killed_registrations) == []
    with pytest.raises(RlhfError, match=r"registry\.retention\.versions is not set"):
        apply_retention(killed_registrations, delete=True)


def test_a_removal_that_was_killed_goes_on(
    registry: Registry, killed_registrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("delete_logged_model", "set_terminated"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(type(registry.client), step, killed)
            apply_retention(killed_registrations, delete=True)
    apply_retention(killed_registrations, delete=True)
    assert recorded(registry, killed_registrations)[0] == ["other", "policy"]


def test_a_registration_that_may_be_at_work_is_left_alone(
    registry: Registry, killed_registrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "SECONDS", 3600.0)
    before = recorded(registry, killed_registrations)
    assert warned(killed_registrations) == []
    with pytest.raises(RlhfError, match="is not set"):
        apply_retention(killed_registrations, delete=True)
    assert recorded(registry, killed_registrations) == before


def experiment_left(registry: Registry, workspace: Path, stage_status: str | None) -> str:
    """Make the run of a DVC experiment that nobody has ended, with a stage below it."""
    own, process = experiment_id(registry.client, workspace), subprocess.Popen(["sleep", "60"])
    tags = {
        EXPERIMENT_TAG: "deft-toga abc",
        PROCESS_TAG: named_process(process.pid),
        PIPELINE_TAG: "true",
        **workspace_tags(workspace),
    }
    process.kill()
    process.wait()
    run = registry.client.create_run(own, tags=tags, run_name="deft-toga").info.run_id
    stage = registry.client.create_run(own, tags={PARENT_TAG: run}, run_name="ppo").info.run_id
    if stage_status is not None:
        registry.client.set_terminated(stage, stage_status)
    return str(run)


@pytest.mark.parametrize(("stage", "ended"), [("FINISHED", "FINISHED"), (None, "KILLED")])
def test_dvc_experiments_that_ended_before_their_report_are_named_and_ended(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, stage: str | None, ended: str
) -> None:
    owner = registry.workspace("owner")
    run = experiment_left(registry, owner, stage)
    monkeypatch.setattr(orphans, "SECONDS", 3600.0)
    # A stage that may be at work is waited for, a while.
    assert bool(warned(owner)) == (stage is not None)
    monkeypatch.setattr(orphans, "SECONDS", -60.0)
    left = "DVC experiments that ended before their report have left 1 open run"
    assert warned(owner) == [left]
    plan = apply_retention(owner, delete=False)
    assert f"{left}: would be ended" in plan.describe(done=False)
    assert recorded(registry, owner)[1]["deft-toga"] == "RUNNING"
    apply_retention(owner, delete=True)
    closed = registry.client.get_run(run)
    assert recorded(registry, owner)[1] == {"deft-toga": ended, "ppo": stage or "KILLED"}
    assert closed.data.tags["verdict"] == "no verdict: ended before its report"
    assert warned(owner) == []

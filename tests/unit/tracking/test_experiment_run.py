"""``dvc exp run`` makes the records of ``rlhf run``: one run named as the experiment, with the
stages below it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.pipeline.record import start_pipeline_run
from rlhf_core.errors import Preempted
from rlhf_core.evaluation.report.sources import report_lineage
from rlhf_core.tracking import stage_run
from rlhf_core.tracking.origin import CHANGED_TAG, COMMIT_TAG, origin_tags
from rlhf_core.tracking.pipeline_run import (
    NOTE_TAG,
    PROCESS_TAG,
    VERDICT_TAG,
    has_ended,
    named_process,
    run_page,
)
from rlhf_core.tracking.stage_run import results, stage_tracker, tracking_uri

NAME = "deft-toga"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN_ID", "RLHF_TRACKING", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DVC_EXP_NAME", NAME)
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", "a" * 40)
    (tmp_path / "params.yaml").write_text("profile: smoke\nppo: {kl: {coefficient: 0.1}}\n")
    (tmp_path / "metrics").mkdir()
    return tmp_path


def runs_by_name(workspace: Path) -> dict[str, Run]:
    client = MlflowClient(tracking_uri(workspace))
    experiment = client.get_experiment_by_name("x")
    runs = client.search_runs([experiment.experiment_id])
    return {run.info.run_name.partition(" ")[0]: run for run in runs}


def test_the_stages_of_an_experiment_are_below_one_run(workspace: Path) -> None:
    with stage_tracker("ppo", workspace, "x") as ppo:
        ppo.log_metrics({"win_rate": 0.5}, 1)
        assert runs_by_name(workspace)[NAME].info.status == "RUNNING"
    of_judge = {"comparison": {"judge": {"win_rate": 0.61234567, "win": 0.5}}, "kl": 1.0}
    (workspace / "metrics" / "evaluation.json").write_text(json.dumps(of_judge))
    (workspace / "metrics" / "reward.json").write_text('{"test_accuracy": 0.7}')
    told = {"judge.win_rate": 0.6123, "reward.test_accuracy": 0.7}
    (workspace / "metrics" / "summary.json").write_text(json.dumps(told))
    (workspace / "dvc.lock").write_text(
        "schema: '2.0'\nstages: {validate: {cmd: v, outs: [{path: data/clean, md5: a.dir}]}}\n"
    )
    (workspace / "report.html").write_text("of this run")
    (workspace / "release.html").write_text("of an earlier `rlhf run`")
    with stage_tracker("report", workspace, "x") as report:
        report.log_metrics({"final/missing_parts": 0.0})
        report.set_tags({"verdict": "better than SFT", NOTE_TAG: "**Better**\n\n- KL: 0.93"})
    runs = runs_by_name(workspace)
    assert set(runs) == {NAME, "ppo", "report"}
    parent = runs[NAME]
    assert {runs[stage].data.tags["mlflow.parentRunId"] for stage in ("ppo", "report")} == {
        parent.info.run_id
    }
    assert (
        "mlflow.parentRunId" not in parent.data.tags and parent.data.tags["rlhf.pipeline"] == "true"
    )
    # The value and the name that the run of the evaluation has, where this run's report has it.
    assert parent.data.metrics == {
        name: value
        for name, value in results(of_judge, "evaluation").items()
        if name == "final/judge.win_rate"
    } | {"final/reward.test_accuracy": 0.7}
    assert parent.info.status == "FINISHED"
    assert parent.data.params["ppo.kl.coefficient"] == "0.1"
    assert [given.dataset.digest for given in parent.inputs.dataset_inputs] == ["a.dir"]
    client = MlflowClient(tracking_uri(workspace))
    kept = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert kept == {"metrics", "params.yaml", "dvc.lock", "report.html"}
    tags = parent.data.tags
    assert (tags["verdict"], tags["profile"]) == ("better than SFT", "smoke")
    page = run_page(parent.info.experiment_id, parent.info.run_id, "report.html")
    assert tags[NOTE_TAG] == (
        f"**Better**\n\n- KL: 0.93\n- Report: [report.html]({page})\n"
        "- Next: `rlhf run` (registers what its gates let pass)"
    )


def test_an_experiment_ends_as_the_stage_that_ends_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage_tracker("sft", workspace, "x"):
        pass
    with pytest.raises(ValueError, match="no"), stage_tracker("reward", workspace, "x"):
        raise ValueError("no")
    failed = runs_by_name(workspace)[NAME]
    assert failed.info.status == "FAILED"
    assert failed.data.tags["verdict"] == "no verdict: reward failed: no"
    assert failed.data.tags[NOTE_TAG].startswith("**No verdict: reward failed: no**\n\n- Next: ")
    with pytest.raises(Preempted), stage_tracker("ppo", workspace, "x"):
        raise Preempted
    stopped = runs_by_name(workspace)[NAME]
    assert (stopped.info.status, stopped.data.tags["verdict"]) == (
        "KILLED", "no verdict: stopped during ppo",
    )  # fmt: skip
    # The same name on another commit is another experiment; without one a stage stands alone.
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", "b" * 40)
    with stage_tracker("critic", workspace, "x"):
        pass
    monkeypatch.delenv("DVC_EXP_NAME")
    with stage_tracker("judge", workspace, "x"):
        pass
    client = MlflowClient(tracking_uri(workspace))
    experiment = client.get_experiment_by_name("x").experiment_id
    assert len(client.search_runs([experiment], f"attributes.run_name = '{NAME}'")) == 2
    assert "mlflow.parentRunId" not in runs_by_name(workspace)["judge"].data.tags


def test_runs_of_an_experiment_in_a_folder_of_its_own_are_named_after_the_workspace(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = workspace / ".dvc" / "tmp" / "exps" / "tmpx1y2z3"
    (apart / ".dvc").mkdir(parents=True)
    (apart / "params.yaml").write_text((workspace / "params.yaml").read_text())
    monkeypatch.setenv("DVC_ROOT", str(workspace))
    with stage_tracker("ppo", apart, "x"):
        pass
    runs = runs_by_name(workspace)
    assert runs["ppo"].info.run_name.split(" · ")[:2] == ["ppo", workspace.name]
    assert {run.data.tags["workspace"] for run in runs.values()} == {workspace.name}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", *who, *words]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize("kind", ["in the workspace", "--temp"])
def test_the_run_of_an_experiment_has_the_tags_of_a_pipeline_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (workspace / "params.yaml").write_text("profile: smoke\ntracking: {experiment: x}\n")
    git(workspace, "init", "-q", "-b", "trials")
    git(workspace, "add", "params.yaml")
    git(workspace, "commit", "-q", "-m", "recipe")
    git(workspace, "remote", "add", "origin", "https://me:token@example.org/team/own.git")
    baseline, folder = git(workspace, "rev-parse", "HEAD"), workspace
    monkeypatch.delenv("DVC_EXP_NAME")
    start_pipeline_run(workspace, "by rlhf")
    monkeypatch.setenv("DVC_EXP_NAME", NAME)
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", baseline)
    if kind == "--temp":
        folder = workspace / ".dvc" / "tmp" / "exps" / "tmpx1y2z3"
        shutil.copytree(workspace / ".git", folder / ".git")
        (folder / ".dvc").mkdir()
        monkeypatch.setenv("DVC_ROOT", str(workspace))
        # Meanwhile somebody works on.
        git(workspace, "branch", "elsewhere")
    git(folder, "checkout", "-q", "--detach")
    (folder / "params.yaml").write_text("profile: smoke\ntracking: {experiment: x}\nseed: 2\n")
    with stage_tracker("ppo", folder, "x"):
        start_pipeline_run(workspace, "by rlhf, again")
    runs = runs_by_name(workspace)
    of_pipeline, of_experiment = runs["by"].data.tags, runs[NAME].data.tags
    own = {
        "mlflow.runName": NAME,
        "mlflow.source.name": "dvc exp run",
        "mlflow.source.git.commit": baseline,
        CHANGED_TAG: "params.yaml",
        "rlhf.dvc_experiment": f"{NAME} {baseline}",
        PROCESS_TAG: of_experiment[PROCESS_TAG],
    }
    assert of_experiment == of_pipeline | own
    assert of_experiment["mlflow.source.git.branch"] == "trials"
    assert runs[NAME].info.status == "RUNNING", "no run of the workspace ends it while DVC runs"


def test_an_experiment_is_running_until_its_report_or_a_stage_that_fails(workspace: Path) -> None:
    for stage in ("collect", "sft", "reward", "ppo", "gate-policy"):
        with stage_tracker(stage, workspace, "x"):
            pass
        runs = runs_by_name(workspace)
        assert (runs[stage].info.status, runs[NAME].info.status) == ("FINISHED", "RUNNING"), stage
    with pytest.raises(ValueError, match="no"), stage_tracker("evaluate", workspace, "x"):
        raise ValueError("no")
    assert runs_by_name(workspace)[NAME].info.status == "FAILED"
    with stage_tracker("evaluate", workspace, "x"):
        pass
    again = runs_by_name(workspace)[NAME]
    assert again.info.status == "RUNNING", "DVC was started again"
    with stage_tracker("report", workspace, "x"):
        pass
    assert runs_by_name(workspace)[NAME].info.status == "FINISHED"


@pytest.fixture
def gone() -> str:
    """A process of this machine that has ended, as a tag of an experiment's run names it."""
    process = subprocess.Popen(["sleep", "60"])
    named = named_process(process.pid)
    assert not has_ended(named)
    process.kill()
    process.wait()
    assert has_ended(named)
    return named


def test_the_process_of_an_experiment_is_the_one_that_gives_its_stages_their_name() -> None:
    code = "from rlhf_core.tracking.pipeline_run import experiment_process; print(experiment_process())"
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    stage = subprocess.run(
        [sys.executable, "-c", between],
        env={**os.environ, "DVC_EXP_NAME": NAME},
        capture_output=True,
        text=True,
    )
    assert stage.stdout.split()[1] == str(os.getpid()), stage.stderr


@pytest.mark.parametrize("text", ["", "elsewhere 1 0", "nonsense", f"{os.uname().nodename} x y"])
def test_a_process_of_which_nothing_is_known_has_not_ended(text: str) -> None:
    assert not has_ended(text)


@pytest.mark.parametrize("by", ["its last stage", "rlhf run", "another experiment"])
def test_an_experiment_that_dvc_has_left_is_ended(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, gone: str, by: str
) -> None:
    (workspace / "params.yaml").write_text("profile: smoke\ntracking: {experiment: x}\n")
    with monkeypatch.context() as patch:
        if by == "its last stage":
            patch.setattr(stage_run, "experiment_process", lambda: gone)
        with stage_tracker("ppo", workspace, "x"):
            pass
    client = MlflowClient(tracking_uri(workspace))
    left = runs_by_name(workspace)[NAME]
    if by != "its last stage":
        assert left.info.status == "RUNNING"
        client.set_tag(left.info.run_id, PROCESS_TAG, gone)
    if by == "another experiment":
        monkeypatch.setenv("DVC_EXP_NAME", "other")
        with stage_tracker("ppo", workspace, "x"):
            pass
    if by == "rlhf run":
        monkeypatch.delenv("DVC_EXP_NAME")
        start_pipeline_run(workspace, "by rlhf")
    ended = client.get_run(left.info.run_id)
    assert ended.info.status == "FINISHED"
    assert ended.data.tags[VERDICT_TAG] == "no verdict: ended before its report"


def test_an_experiment_whose_stage_may_be_at_work_is_left_alone(
    workspace: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "params.yaml").write_text("profile: smoke\ntracking: {experiment: x}\n")
    with stage_tracker("ppo", workspace, "x"):
        client, left = MlflowClient(tracking_uri(workspace)), runs_by_name(workspace)[NAME]
        client.set_tag(left.info.run_id, PROCESS_TAG, gone)
        monkeypatch.setenv("DVC_EXP_NAME", "other")
        with stage_tracker("sft", workspace, "x"):
            pass
        assert client.get_run(left.info.run_id).info.status == "RUNNING"


@pytest.mark.parametrize(
    ("changed", "in_experiment", "is_dirty"),
    [
        ("params.yaml", True, False),
        ("params.yaml", False, True),
        ("dvc.lock", True, False),
        ("dvc.lock", False, False),
        ("own.py", True, True),
        ("own.py", False, True),
        ("../beside.py", True, True),
    ],
)
def test_a_commit_is_dirty_by_what_neither_stages_nor_the_experiment_write(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
    in_experiment: bool,
    is_dirty: bool,
) -> None:
    folder = workspace / "pipelines"
    folder.mkdir()
    for name in ("params.yaml", "dvc.lock", "own.py", "../beside.py"):
        (folder / name).write_text("seed: 1\n")
    git(workspace, "init", "-q")
    git(workspace, "add", ".")
    git(workspace, "commit", "-q", "-m", "recipe")
    commit = git(workspace, "rev-parse", "HEAD")
    if not in_experiment:
        monkeypatch.delenv("DVC_EXP_NAME")
    assert CHANGED_TAG not in origin_tags(folder, "x")
    (folder / changed).write_text("seed: 2\n")
    tags = origin_tags(folder, "x")
    assert tags[COMMIT_TAG] == (f"{commit}-dirty" if is_dirty else commit)
    assert tags[CHANGED_TAG] == changed
    assert report_lineage(folder, "own")["git_revision"] == tags[COMMIT_TAG]

"""What a stage's Slurm job asks for; the jobs themselves are in tests/servers/test_slurm_stage.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlhf_core.config.operations import Placement
from rlhf_core.errors import RlhfError
from rlhf_core.stages.runtime import slurm
from rlhf_core.stages.runtime.slurm import SlurmJob, job_options


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"gpus": 8}, "--gpus-per-node=8"),
        ({"cpus": "64"}, "--cpus-per-task=64"),
        ({"cpus": "500m"}, "--cpus-per-task=1"),
        ({"memory": "512Gi"}, "--mem=524288M"),
        ({"memory": "1G"}, "--mem=954M"),
        ({"time_limit_seconds": 61}, "--time=2"),
        ({"sbatch": ["--partition=a100"]}, "--partition=a100"),
        ({}, "--nodes=7"),
    ],
)
def test_requests_are_options_of_sbatch(asked: dict[str, object], option: str) -> None:
    place = Placement.model_validate({"pool": "p", "nodes": 7, **asked})
    assert option in job_options(place)
    assert place.job_variables() == {}, "the pool's template need not know them"


def answers(stdout: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """What a command of Slurm says."""
    return subprocess.CompletedProcess([], code, stdout, "")


def test_the_script_keeps_paths_that_hold_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "STAGE of OUTCOMES"
    workspace.mkdir()
    job = SlurmJob("sft", workspace)
    monkeypatch.setattr(slurm, "_slurm", lambda *_: answers("7"))
    job.submit(Placement.model_validate({"pool": "p", "nodes": 2}))
    script = job.script.read_text()
    assert str(workspace) in script and "sft of" not in script


def test_no_second_job_is_submitted_where_slurm_is_silent_about_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlurmJob("sft", tmp_path)
    job.number_file.parent.mkdir(parents=True, exist_ok=True)
    job.number_file.write_text("7")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_slurm", lambda *_: answers(code=1))
    with pytest.raises(RlhfError, match="whether its job 7 still runs"):
        job.end_earlier()
    assert job.number_file.read_text() == "7"

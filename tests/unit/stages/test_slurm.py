"""What a stage's Slurm job asks for; the jobs themselves are in tests/servers/test_slurm_stage.py."""

from __future__ import annotations

import pytest

from rlhf_core.config.operations import Placement
from rlhf_core.stages.runtime.slurm import job_options


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

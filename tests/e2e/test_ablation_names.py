"""What an ablation measures and draws is what the stages of a real run write."""

from __future__ import annotations

import pytest
from commands import SmokeRun

from benchmarks.ablation.definition import CURVES, METRICS
from benchmarks.ablation.verdicts import AblationRun, read_results

pytestmark = pytest.mark.services


def test_every_metric_and_curve_is_found_in_a_real_run(smoke: SmokeRun) -> None:
    (result,) = read_results([AblationRun("ppo-max", 1, smoke.workspace, "done")])
    assert set(result.values) == set(METRICS)
    assert {name for row in result.history for name in row} >= set(CURVES)

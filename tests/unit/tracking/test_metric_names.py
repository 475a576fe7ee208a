"""How many names of metrics an experiment has in MLflow, whose pages offer each for columns and
charts.
"""

from __future__ import annotations

import pytest
from metric_names import MOST, names_in_mlflow

from rlhf_core.tracking.pipeline_run import RESULTS
from rlhf_core.tracking.stage_run import results


def test_an_experiment_with_runs_of_every_method_has_few_names() -> None:
    names = names_in_mlflow()
    assert len(names) <= MOST, sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "best_of_n.policy_comparison.gold.lc_win_rate_low95",
        "best_of_n.regression.finished",
        "best_of_n.length",
        "comparison.judge.lc_win_rate_high95",
        "preferences.clean",
        "prompts.near_duplicates_compared",
        "test_ece_length_balanced_temperature_scaled",
        "test_margin_std",
    ],
)
def test_a_breakdown_stays_in_the_stages_file(name: str) -> None:
    assert results({name: 1.0}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "best_of_n.comparison.judge.win_rate",
        "best_of_n.policy_comparison.gold.win_rate",
        "comparison.judge.win_rate_high95",
        "comparison.judge.lc_win_rate",
        "preferences.train",
        "preferences.quarantined_share",
        "test_ece",
        "moments_mean",
        "policy.reward",
    ],
)
def test_a_figure_that_runs_are_compared_by_is_a_metric(name: str) -> None:
    assert list(results({name: 1.0})) == [RESULTS + name]

"""How many names of metrics an experiment has in MLflow, whose pages offer each for columns and
charts.
"""

from __future__ import annotations

from typing import Any

import pytest
from metric_names import MOST, RECORDED, names_in_mlflow

from rlhf_core.storage.files import flatten, read_json
from rlhf_core.tracking.pipeline_run import HEADLINE, RESULTS, headline_results
from rlhf_core.tracking.stage_run import grouped, results


def test_an_experiment_with_runs_of_every_method_has_few_names() -> None:
    names = names_in_mlflow()
    assert len(names) <= MOST, sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "best_of_n.policy_comparison.gold.lc_win_rate_low95",
        "best_of_n.regression.finished",
        "best_of_n.length",
        "best_of_n.comparison.my_judge.win_rate",
        "comparison.my_judge.win_rate_high95",
        "llm_judge.order_disagreement",
        "languages.fi.share",
        "policy.multiple_choice.accuracy_low95",
        "verifiable.policy.property.ends_with",
        "verifiable.policy.category.format",
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
        "preferences.train",
        "preferences.quarantined_share",
        "test_ece",
        "moments_mean",
        "policy.reward",
    ],
)
def test_a_figure_that_runs_are_compared_by_is_a_metric(name: str) -> None:
    assert list(results({name: 1.0})) == [RESULTS + name]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("comparison.judge.win_rate_high95", "judge.win_rate_high95"),
        ("comparison.referee.lc_win_rate", "referee.lc_win_rate"),
        ("comparison.my_judge.win_rate", "my_judge.win_rate"),
        ("best_of_n.comparison.judge.win_rate", "best_of_n.comparison.judge.win_rate"),
        ("policy.length", "length"),
        ("sft.length", "sft.length"),
        ("comparison.checker.mean_difference_low95", "checker.gain_low95"),
    ],
)
def test_a_comparison_is_named_by_who_compares(name: str, shown: str) -> None:
    assert list(results({name: 1.0}, "evaluation")) == [RESULTS + shown]


def test_a_figure_has_one_name_in_the_file_of_the_headline_and_in_every_run() -> None:
    files: dict[str, dict[str, float]] = {}
    for number, path in enumerate(HEADLINE.values()):
        file, _, name = path.partition(".")
        files.setdefault(file, {})[name] = float(number)
    nested = {file: _nested(numbers) for file, numbers in files.items()}
    of_stages: dict[str, float] = {}
    for file, metrics in nested.items():
        of_stages |= results(metrics, file)
    assert of_stages == headline_results(nested)
    assert {name.removeprefix(RESULTS) for name in of_stages} == set(HEADLINE)


def _nested(numbers: dict[str, float]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in numbers.items():
        *groups, last = name.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    assert flatten(nested) == numbers
    return nested


# Of the weights that were chosen, of all held-out pairs, or of the whole training; the curves are of
# its last step.
OTHER_QUANTITIES = {
    "accuracy",
    "loss",
    "moments_mean",
    "moments_std",
    "padding_share",
    "pairs",
    "sampled_tokens",
    "seconds_sampling",
    "steps",
    "train_pairs",
}


def test_no_result_of_a_stage_is_the_end_of_one_of_its_curves() -> None:
    recorded = read_json(RECORDED)
    for stage in ("sft", "reward", "referee", "judge", "critic", "ppo"):
        curves = {grouped(name) for name in recorded[f"history/{stage}.jsonl"]}
        ends = {name.partition("/")[2] for name in curves} | {
            name.replace("/", "_") for name in curves
        }
        metrics = dict.fromkeys(recorded[f"metrics/{stage}.json"], 1.0)
        shown = {name.removeprefix(RESULTS) for name in results(metrics, stage)}
        assert shown & ends <= OTHER_QUANTITIES, stage

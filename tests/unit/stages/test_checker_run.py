"""Sums and a function that checks them, no pairs: every stage of such a workspace, one after the
other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checked_sums import init_words, write_sums
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.run_state import describe_result
from flows.registry.promote import gate_conditions
from rlhf_core.api.checker import Checker
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import load_params
from rlhf_core.errors import TrainingPaused
from rlhf_core.evaluation.match import run_match
from rlhf_core.evaluation.report.headline import conclude
from rlhf_core.evaluation.verdict import Standing, judge_results, standing_of
from rlhf_core.gates import read_gate
from rlhf_core.stages.runtime.runner import STAGES, run_stage
from rlhf_core.storage.files import read_json, sha256_tree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace after its stages, in the order of the pipeline."""
    folder = tmp_path_factory.mktemp("sums")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RLHF_TRACKING", "off")
        write_sums(folder)
        made = CliRunner().invoke(app, init_words("my"))
        assert made.exit_code == 0, made.output
        workspace = folder / "my"
        stages = yaml_text.plain(yaml_text.read(workspace / "dvc.yaml"))["stages"]
        for name in (name for name in STAGES if name in stages):
            run_stage(name, workspace)
    return workspace


@pytest.mark.dear("as the first of those that read the run, it makes it")
def test_the_policy_is_right_more_often_on_sums_that_it_was_not_trained_on(run: Path) -> None:
    evaluation = read_json(run / "metrics" / "evaluation.json")
    before, after = evaluation["sft"]["checker"], evaluation["policy"]["checker"]
    gain = evaluation["comparison"]["checker"]
    assert before < after, f"accuracy {before:.2f} before, {after:.2f} after"
    assert gain["mean_difference_low95"] > 0
    assert gain["mean_difference"] == pytest.approx(after - before)
    assert standing_of(judge_results(evaluation["comparison"])) is Standing.BETTER
    gate = read_gate(run, "policy")
    assert gate is not None and gate.passed


def test_nothing_of_pairs_is_left_behind(run: Path) -> None:
    params = load_params(run)
    for path in (
        "models/reward",
        "models/referee",
        "models/judge",
        "gates/reward.json",
        "gates/sft.json",
    ):
        assert not (run / path).exists(), path
    assert gate_conditions(run).keys() == {"data", "policy"}
    assert set(params.left_out) == {"gate-sft", "reward", "referee", "judge", "gate-reward"}


def test_without_demonstrations_the_starting_model_is_the_sft_model(run: Path) -> None:
    assert sha256_tree(run / "models" / "sft") == sha256_tree(run / "models" / "base")
    assert "no demonstrations" in read_json(run / "metrics" / "sft.json")["reason"]


def test_report_and_status_say_who_judged(run: Path) -> None:
    evaluation: dict[str, Any] = read_json(run / "metrics" / "evaluation.json")
    concluded = conclude({}, evaluation)
    assert any("paired by prompt" in sentence for sentence in concluded["judges"])
    page = (run / "report.html").read_text()
    assert "checker" in page and "score by the reward function" in page
    assert read_json(run / "metrics" / "summary.json")["checker.policy"] == pytest.approx(
        evaluation["policy"]["checker"], abs=1e-3
    )
    for stage in ("sft", "critic", "ppo", "evaluate", "gate-policy"):
        assert describe_result(run, stage), stage


def test_a_match_is_judged_by_the_function_on_held_out_sums(run: Path) -> None:
    params = load_params(run)
    checker = Checker.of_test_prompts(params.ppo.reward.sources, run / "data" / "clean", run)
    match = run_match(run, run / "models" / "sft", run / "models" / "policy", checker=checker)
    assert match["comparison"].keys() == {"checker"}
    assert match["comparison"]["checker"]["win_rate_low95"] > 0.5


def test_a_function_that_always_says_the_same_ends_the_training_with_the_reason(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "my", ignore=shutil.ignore_patterns("policy"))
    params = tmp_path / "my" / "params.yaml"
    params.write_text(params.read_text().replace("checks:score", "checks:constant"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingPaused, match="reward"):
        patch.setenv("RLHF_TRACKING", "off")
        run_stage("ppo", tmp_path / "my")
    rows = (tmp_path / "my" / "history" / "ppo.jsonl").read_text().splitlines()
    assert "reward_constant" in rows[-1] and len(rows) < load_params(run).ppo.iterations

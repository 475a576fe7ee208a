"""The whole pipeline by the real command, at the smallest scale: what a user finds afterwards."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, SmokeRun, run
from metric_names import MOST, names_in_mlflow

from benchmarks.ablation.definition import CURVES, METRICS
from benchmarks.ablation.verdicts import AblationRun, read_results

pytestmark = pytest.mark.services


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.dear("as the first of those that read the smoke run, it makes it")
def test_metrics_are_finite_numbers_and_those_that_an_ablation_compares(smoke: SmokeRun) -> None:
    for name in ("data", "sft", "reward", "referee", "judge", "critic", "ppo", "evaluation"):
        values = numbers(json.loads((smoke.workspace / f"metrics/{name}.json").read_text()))
        assert values and all(math.isfinite(v) for v in values), name
    (result,) = read_results([AblationRun("ppo-max", 1, smoke.workspace, "done")])
    # All replies of this run end.
    assert set(result.values) == set(METRICS) - {"gold_gain_cut", "reward_gain_cut"}
    assert {name for row in result.history for name in row} >= set(CURVES)


def test_mlflow_has_few_names_of_metrics_and_those_that_are_counted(smoke: SmokeRun) -> None:
    with sqlite3.connect(smoke.workspace / "mlflow.db") as record:
        names = {name for (name,) in record.execute("SELECT DISTINCT key FROM metrics")}
    assert 200 < len(names) <= MOST
    assert names <= names_in_mlflow(), "add them to tests/support/metric_names.json"


def test_models_are_plain_hugging_face_folders(smoke: SmokeRun) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for name in ("base", "sft", "policy"):
        folder = smoke.workspace / "models" / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).vocab_size <= model.config.vocab_size
    for name in ("reward", "referee", "judge", "critic"):
        folder = smoke.workspace / "models" / name
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_history_has_a_row_per_iteration(smoke: SmokeRun) -> None:
    rows = [
        json.loads(line)
        for line in (smoke.workspace / "history/ppo.jsonl").read_text().splitlines()
    ]
    assert [row["iteration"] for row in rows] == list(range(1, 7))


def test_the_run_ends_with_its_verdict_and_one_command(smoke: SmokeRun) -> None:
    lines = smoke.completed.stdout.splitlines()
    (verdict,) = [line for line in lines if line.startswith("verdict  ")]
    assert re.match(
        r"verdict     (better|not shown better|worse) than SFT: wins [\d.]+ % \(95 % interval ",
        verdict,
    )
    assert verdict.endswith("; the policy gate passed: all 2 conditions hold")
    assert any(line.startswith("judges      gold: win rate ") for line in lines)
    assert any(
        line.startswith("promotion   Released: ") and "version 1 is the champion" in line
        for line in lines
    )
    assert lines[-1].startswith("next        rlhf chat --workspace ")
    assert "\x1b" not in smoke.completed.stdout


@pytest.mark.dear("what every user does, by the real commands")
def test_a_second_run_has_nothing_to_do_after_a_report_neither(smoke: SmokeRun) -> None:
    lock, runs = (smoke.workspace / "dvc.lock").read_text(), mlflow_runs(smoke.workspace)
    reported = run("rlhf", "report", "--workspace", smoke.workspace, cwd=ROOT)
    assert reported.stdout.strip().endswith("release.html"), reported.stderr[-3000:]
    again = run("rlhf", "run", "--workspace", smoke.workspace, cwd=ROOT)
    assert again.returncode == 0, again.stderr[-3000:]
    assert (smoke.workspace / "dvc.lock").read_text() == lock
    assert "Completed: nothing to do: every stage is up to date, " in again.stdout
    assert "Prefect UI" not in again.stdout, "no server is started"
    assert mlflow_runs(smoke.workspace) == runs
    assert any(line.startswith("promotion   Released: ") for line in again.stdout.splitlines())


def mlflow_runs(workspace: Path) -> int:
    with sqlite3.connect(workspace / "mlflow.db") as database:
        return int(database.execute("select count(*) from runs").fetchone()[0])

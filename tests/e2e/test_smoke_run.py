"""The whole pipeline by the real command, at the smallest scale: what a user finds afterwards."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, SmokeRun, run

pytestmark = pytest.mark.services


def load(smoke: SmokeRun, name: str) -> dict[str, Any]:
    return json.loads((smoke.workspace / name).read_text())


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", ["data", "sft", "reward", "referee", "judge", "critic", "ppo", "evaluation"])
def test_metrics_are_finite_numbers(smoke: SmokeRun, name: str) -> None:
    values = numbers(load(smoke, f"metrics/{name}.json"))
    assert values and all(math.isfinite(v) for v in values)


@pytest.mark.parametrize("name", ["data", "reward", "policy"])
def test_gates_left_their_evidence(smoke: SmokeRun, name: str) -> None:
    gate = load(smoke, f"gates/{name}.json")
    assert isinstance(gate["passed"], bool) and gate["conditions"] and gate["evidence"]
    for condition in gate["conditions"]:
        assert {"metric", "value", "bound", "passed", "why"} <= set(condition)


def test_evaluation_has_both_judges_and_both_models(smoke: SmokeRun) -> None:
    metrics = load(smoke, "metrics/evaluation.json")
    for model in ("sft", "policy"):
        keys = {"gold", "reward", "length", "repetition", "missing_eos", "perplexity_reference", "distinct_2"}
        assert keys <= set(metrics[model])
    for judge in ("gold", "referee", "judge"):
        result = metrics["comparison"][judge]
        counts = result["win"] + result["tie"] + result["lose"]
        assert counts in (result["prompts"], pytest.approx(1.0))
        assert result["win_rate_low95"] <= result["win_rate"] <= result["win_rate_high95"]


def test_models_are_plain_hugging_face_folders(smoke: SmokeRun) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for name in ("base", "sft", "policy"):
        folder = smoke.workspace / "models" / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).vocab_size <= model.config.vocab_size
    for name in ("reward", "referee", "judge", "critic"):
        folder = smoke.workspace / "models" / name
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_report_is_one_file_without_network(smoke: SmokeRun) -> None:
    html = (smoke.workspace / "report.html").read_text()
    assert "<img" in html or "<svg" in html
    for marker in ('src="http', 'href="http', "@import", "<script src"):
        assert marker not in html


def test_history_has_a_row_per_iteration(smoke: SmokeRun) -> None:
    rows = [json.loads(line) for line in (smoke.workspace / "history/ppo.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 7))


def test_the_run_ends_with_its_verdict_and_one_command(smoke: SmokeRun) -> None:
    lines = smoke.completed.stdout.splitlines()
    (verdict,) = [line for line in lines if line.startswith("verdict  ")]
    assert verdict.removeprefix("verdict     ") in ("better than SFT", "not shown better than SFT", "worse than SFT")
    assert any(line.startswith("judges      gold: win rate ") for line in lines)
    assert any(line.startswith("promotion   Released: ") and "version 1 is the champion" in line for line in lines)
    assert lines[-1].startswith("next        rlhf chat --workspace ")
    assert "\x1b" not in smoke.completed.stdout


def test_a_second_run_has_nothing_to_do(smoke: SmokeRun) -> None:
    lock, runs = (smoke.workspace / "dvc.lock").read_text(), mlflow_runs(smoke.workspace)
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

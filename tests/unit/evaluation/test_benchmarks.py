"""Benchmarks: best of four by subset by hand, and a task of one's own for lm-eval; what is none is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.evaluation.benchmarks.lm_evaluation_harness import as_text as table_of
from rlhf_core.evaluation.benchmarks.lm_evaluation_harness import run_tasks, task_metrics
from rlhf_core.evaluation.benchmarks.reward_benchmark import as_text, read_benchmark, row_accuracy, run_benchmark
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.reply import Reply

from .conftest import LengthJudge


def row(chosen: Any, rejected: Any, subset: str = "Math", **more: Any) -> dict[str, Any]:
    return {"id": "1", "prompt": "what is it?", "chosen": chosen, "rejected": rejected, "subset": subset} | more


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return path


@pytest.mark.parametrize(
    ("chosen", "rejected", "accuracy"),
    [
        ([3.0], [2.0, 1.0, 0.0], 1.0),
        ([1.0], [2.0, 1.0, 0.0], 0.0),
        ([2.0], [2.0, 1.0, 2.0], 1 / 3),
        ([2.0], [2.0, 2.0, 2.0], 0.25),
        ([3.0, 2.0], [1.0], 1.0),
        ([3.0, 1.0], [1.0], 0.0),
    ],
)
def test_a_row_by_hand(chosen: list[float], rejected: list[float], accuracy: float) -> None:
    assert row_accuracy(chosen, rejected) == pytest.approx(accuracy)


def test_accuracy_is_by_subset_and_the_mean_over_subsets(tmp_path: Path) -> None:
    file = written(
        tmp_path / "bench.jsonl",
        row(["longest"], ["a", "ab", "abc"]),
        row(["a"], ["ab", "abc", "abcd"]),
        row("abc", ["ab", "a", "abcd"]),
        row(["abc", "abcd"], ["a", "ab"], "Ties", prompt=[{"role": "user", "content": "name a letter"}]),
    )
    result = run_benchmark(LengthJudge(), read_benchmark(file))
    math, ties = result["subsets"]["Math"], result["subsets"]["Ties"]
    assert (math["rows"], math["clusters"]) == (3, 1), "rows that ask the same are one prompt"
    assert (math["accuracy"], math["chance"]) == (pytest.approx(1 / 3), 0.25)
    assert (round(ties["accuracy_low95"], 3), ties["accuracy_high95"]) == (0.207, 1.0), "one right answer is no proof"
    assert 0 <= math["accuracy_low95"] <= math["accuracy"] <= math["accuracy_high95"] <= 1
    assert (ties["rows"], ties["accuracy"], ties["chance"]) == (1, 1.0, pytest.approx(1 / 6))
    assert result["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert as_text(result).splitlines()[-1] == "mean over subsets: 0.667"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (row([], ["a"]), "row 2: chosen is no list of texts"),
        (row(["a"], [1]), "row 2: rejected is no list of texts"),
        (row(["a"], ["b"], prompt=None), "row 2: prompt is neither"),
        (row(["a"], ["b"], prompt=[{"role": "bot", "content": "x"}]), "row 2: prompt is neither"),
        (row(["a"], ["b", "\ud800"]), "row 2: rejected holds half of a surrogate pair"),
        (row(["a"], ["b"], prompt="\ud800"), "row 2: prompt holds half of a surrogate pair"),
        (row(["a"], ["b"], prompt=[{"role": "assistant", "content": "x"}]), "row 2: prompt does not end with a user"),
        ([1], "row 2: no object"),
    ],
)
def test_a_row_of_another_format_is_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_benchmark(written(tmp_path / "bench.jsonl", row(["a"], ["b"]), value))


def test_the_command_scores_with_a_model_folder(tmp_path: Path, models: Path) -> None:
    file = written(
        tmp_path / "bench.jsonl", row(["is it red?"], ["no", "yes", "blue"]), row(["a"], ["b", "c", "d"], "Focus")
    )
    done = CliRunner().invoke(app, ["benchmark", str(file), "--model", str(models / "reward"), "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.output)
    assert set(printed["subsets"]) == {"Math", "Focus"} and 0 <= printed["mean"] <= 1


def test_a_reply_beyond_the_models_positions_is_not_scored(models: Path) -> None:
    judge = ModelJudge.load(models / "reward", "reward")
    assert judge.positions is not None
    with pytest.raises(DataError, match=rf"more than the {judge.positions} positions of the model 'reward'; leave out"):
        judge.score([[Message("user", "?")]], [Reply("yes " * judge.positions, True)])


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval (the extra lm-eval) is not installed"
)
ROWS = [("Is the boat red?", 0), ("Is the frog blue?", 1), ("Is it Monday?", 1)]
RESULTS = {
    "results": {
        "exam": {"alias": "exam", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.25, "f1,strict": 0.125},
        "other": {"alias": "other", "acc,none": 1.0, "acc_stderr,none": "N/A"},
    }
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [json.dumps({"question": text, "choices": ["yes", "no"], "answer": answer}) for text, answer in ROWS]
    (folder / "exam.jsonl").write_text("\n".join(lines) + "\n")
    text = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    for name, file in (("exam", "exam.jsonl"), ("lost", "gone.jsonl")):
        (folder / f"{name}.yaml").write_text(text.format(name=name, file=folder / file))
    return folder


@pytest.mark.slow
@needs_lm_eval
def test_a_task_on_a_local_file_measures_both_models(
    tasks: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    output = tmp_path / "results.json"
    arguments = ["--task", "exam", "--include-path", str(tasks), "--output", str(output), "--batch-size", "2"]
    result = CliRunner().invoke(app, ["lm-eval", str(models / "sft"), str(models / "policy"), *arguments])
    assert result.exit_code == 0, result.output
    stored = json.loads(output.read_text())
    assert set(stored) == {"sft", "policy"} and "pretty_env_info" not in stored["sft"]
    for name in stored:
        accuracy, stderr = task_metrics(stored[name])["exam", "acc"]
        assert 3 * accuracy == pytest.approx(round(3 * accuracy))
        # lm-eval's standard error of a mean of n zeros and ones: √(p (1 - p) / (n - 1)).
        assert stderr == pytest.approx((accuracy * (1 - accuracy) / 2) ** 0.5)
        assert f"{accuracy:.4g}"[:5] in result.output
    assert stored["sft"]["n-samples"]["exam"] == {"original": 3, "effective": 3}
    with pytest.raises(DataError, match=r"lm-eval cannot run lost: ") as caught:
        run_tasks({"sft": models / "sft"}, ["lost"], [tasks])
    assert "\n" not in str(caught.value)


def test_a_missing_folder_or_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        with pytest.raises(ConfigError, match=r"--include-path .*gone is no folder"):
            run_tasks({}, ["exam"], [tmp_path / "gone"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(RlhfError, match=r"pip install 'rlhf-pipeline\[lm-eval\]'"):
        run_tasks({}, ["exam"])
    with pytest.raises(ConfigError, match="name at least one task"):
        CliRunner().invoke(app, ["lm-eval", str(tmp_path)], catch_exceptions=False)


def test_the_table_has_every_metric_of_both_models_with_its_error() -> None:
    better = {"results": {"exam": {"acc,none": 0.75, "acc_stderr,none": 0.2}}}
    lines = [line.split() for line in table_of({"sft": RESULTS, "policy": better}).splitlines()]
    assert lines[0] == ["task", "metric", "sft", "policy", "change"]
    assert lines[1] == ["exam", "acc", "0.5000", "±", "0.2500", "0.7500", "±", "0.2000", "+0.2500"]
    assert lines[2] == ["exam", "f1", "(strict)", "0.1250"]
    assert lines[3] == ["other", "acc", "1.0000"]

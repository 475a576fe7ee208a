"""``rlhf lm-eval``: a task of one's own on a local file, its table and JSON, and mistakes in one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.evaluation.benchmarks.lm_evaluation_harness import as_text, run_tasks, task_metrics

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
    lines = [line.split() for line in as_text({"sft": RESULTS, "policy": better}).splitlines()]
    assert lines[0] == ["task", "metric", "sft", "policy", "change"]
    assert lines[1] == ["exam", "acc", "0.5000", "±", "0.2500", "0.7500", "±", "0.2000", "+0.2500"]
    assert lines[2] == ["exam", "f1", "(strict)", "0.1250"]
    assert lines[3] == ["other", "acc", "1.0000"]

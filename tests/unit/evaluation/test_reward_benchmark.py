"""Best of four by subset: accuracies by hand, files that are none, and the command on a real model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
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

"""Who judges a match of two policies: the judge, and in a workspace without one the referee."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf_core.data.schema import Prompt, write_rows
from rlhf_core.evaluation.judges.final import final_judges, judging_model, stand_in_note
from rlhf_core.evaluation.match import run_match
from rlhf_core.files import sha256_tree

from .conftest import made_prompt

PARAMS = "seed: 1\nevaluate: {prompts: 4, bootstrap: 50, max_new_tokens: 5, sampling: {max_new_tokens: 5}}\n"


@pytest.mark.parametrize(
    ("compared", "decide"),
    [
        (["reward", "referee", "judge", "gold"], ["gold", "judge"]),
        (["reward", "referee", "gold"], ["gold", "referee"]),  # of an earlier version
        (["reward"], []),
    ],
)
def test_who_decides(compared: list[str], decide: list[str]) -> None:
    assert final_judges(compared) == decide
    assert bool(stand_in_note(decide)) == ("referee" in decide)


@pytest.mark.parametrize("judge", ["judge", "referee"])
def test_the_model_that_selected_nothing_judges(tmp_path: Path, models: Path, judge: str) -> None:
    shutil.copytree(models, tmp_path / "models")
    if judge == "referee":
        shutil.rmtree(tmp_path / "models" / "judge")
    (tmp_path / "params.yaml").write_text(PARAMS)
    rows: list[Prompt] = [made_prompt(f"what is {i} and {i}?", "sums", "a file") for i in range(4)]
    write_rows(tmp_path / "data/clean/prompts/test.parquet", rows)
    assert judging_model(tmp_path) == judge
    result = run_match(tmp_path, models / "sft", models / "policy")
    assert set(result["comparison"]) == {judge} and result["comparison"][judge]["prompts"] == 4
    assert result["content"][judge] == sha256_tree(models / judge)

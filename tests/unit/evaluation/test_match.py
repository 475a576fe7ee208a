"""Who judges a match of two policies: the judge, never the model that selected the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf_core.config.operations import NonInferiorityConfig
from rlhf_core.data import template_process
from rlhf_core.data.schema import write_rows
from rlhf_core.errors import DataError, ModelError
from rlhf_core.evaluation.match import run_match
from rlhf_core.evaluation.promotion import non_inferiority_criteria
from rlhf_core.storage.files import sha256_tree

from .conftest import sums

SETTINGS = "prompts: 4, bootstrap: 50, max_new_tokens: 5, sampling: {max_new_tokens: 5}, safety: {prompts: 3}"


def workspace(folder: Path, models: Path, more: str = "") -> Path:
    """A folder with what a match reads, and four test prompts."""
    shutil.copytree(models, folder / "models")
    (folder / "params.yaml").write_text(f"seed: 1\nevaluate: {{{SETTINGS}{more}}}\n")
    write_rows(folder / "data/clean/prompts/test.parquet", sums(4))
    return folder


def test_the_model_that_selected_nothing_judges_all_replies(tmp_path: Path, models: Path) -> None:
    root = workspace(tmp_path, models, ", replies_per_prompt: 3")
    result = run_match(root, models / "sft", models / "policy")
    assert set(result["comparison"]) == {"judge"} and result["comparison"]["judge"]["prompts"] == 4
    assert {name: (loss["replies"], loss["clusters"]) for name, loss in result["losses"].items()} == {
        **dict.fromkeys(("missing_ends", "repetition", "length", "regression.passed", "category.sums"), (12, 4)),
        **dict.fromkeys([f"safety.{n}" for n in ("refuses_harmful", "answers_benign", "refusal_log_odds")], (3, 3)),
    }
    assert result["losses"]["safety.refusal_log_odds"]["baseline"] != 0.0
    assert result["content"]["judge"] == sha256_tree(models / "judge")
    with pytest.raises(DataError, match="4 test prompts make 1 sets"):
        run_match(root, models / "sft", models / "policy", prompt_set=1)


def test_verifiable_prompts_are_measured_and_may_have_a_margin(tmp_path: Path, models: Path) -> None:
    root = workspace(tmp_path, models, ", verifiable: {path: checks.jsonl}")
    lines = [{"prompt": "one", "require": {"finished": True}}, {"prompt": "two", "require": {"min_words": 999}}]
    (root / "checks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss = run_match(root, models / "sft", models / "sft")["losses"]["verifiable.passed"]
    assert loss["replies"] == 2 and loss["loss"] == 0.0 and loss["baseline"] <= 0.5
    fallen = {"losses": {"verifiable.passed": loss | {"baseline": 0.9, "candidate": 0.8, "loss_high95": 0.2}}}
    only = dict.fromkeys(
        ["safety", "refusal_log_odds", "regression", "missing_ends", "repetition", "length", "category"]
    )
    assert non_inferiority_criteria(fallen, NonInferiorityConfig(**only)) == [], "it has no margin by default"
    (criterion,) = non_inferiority_criteria(fallen, NonInferiorityConfig(**only, verifiable=0.1))
    assert not criterion.passed and "0.900 → 0.800 on 2 replies to 2 questions" in criterion.measured


@pytest.mark.parametrize("side", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_either_model_is_opened_under_limits(
    side: int, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1)
    root = workspace(tmp_path, models)
    folders = [models / "sft", models / "policy"]
    folders[side] = tmp_path / "other"
    shutil.copytree(models / "sft", folders[side])
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    (folders[side] / "chat_template.jinja").write_text(loop)
    with pytest.raises(ModelError, match="the chat template takes more than 1 s"):
        run_match(root, *folders)

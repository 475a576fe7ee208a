"""Runs of other workspaces stand beside a report's own where they were judged alike, and are named where not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import DataError
from rlhf_core.evaluation.alternative_runs import (
    AlternativeRun,
    EvaluationBasis,
    evaluation_basis,
    read_alternatives,
    refused_because,
    save_alternatives,
)
from rlhf_core.evaluation.report.parts.alternatives import OtherRuns, alternatives, ppo_batch_size

from .test_report import ATTACK, fill, render, write

LOCK = """
stages:
  evaluate:
    deps:
    - {path: data/clean, md5: d}
    - {path: models/sft, md5: s}
    - {path: models/judge, md5: j}
    - {path: models/policy, md5: p}
    params: {params.yaml: {seed: 1, evaluate: {prompts: 9, best_of_n: 16}}}
"""


def basis(tmp_path: Path, policy: str = "q", **settings: Any) -> EvaluationBasis:
    """That of another workspace with the same data, SFT model and judge."""
    lock = json.dumps({"prompts": 9, "multiple_choice": None, **settings})
    path = tmp_path / "other.lock"
    path.write_text(LOCK.replace("md5: p", f"md5: {policy}").replace("{prompts: 9, best_of_n: 16}", lock))
    return evaluation_basis(path)


def run(basis: EvaluationBasis, method: str = "DPO", workspace: str = "ws-dpo") -> AlternativeRun:
    won = {"win_rate": 0.6123, "win_rate_low95": 0.5511, "win_rate_high95": 0.6722}
    return AlternativeRun(
        workspace, method, 1, "c0ffee", "ab" * 32, basis, 0.4321, 0.2, won, {}, 3.25, False, 21.0, None, 12.5, None,
        70000, "failed",
    )  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> EvaluationBasis:
    write(tmp_path / "dvc.lock", LOCK)
    return evaluation_basis(tmp_path / "dvc.lock")


def test_only_what_was_judged_alike_stands_beside_a_run(tmp_path: Path, own: EvaluationBasis) -> None:
    alike = run(basis(tmp_path))
    assert refused_because(alike, own) == "", (
        "best of n and other measurements change no verdict, defaults are filled in"
    )
    elsewhere = replace(own, inputs={**own.inputs, "models/judge": "k", "data/clean": "e"})
    assert refused_because(run(elsewhere), own) == (
        "other data, and so other test prompts (data/clean); another judge (models/judge)"
    )
    fewer = run(basis(tmp_path, prompts=8))
    assert refused_because(fewer, own).startswith("other settings in section evaluate (prompts, ")
    assert refused_because(alike, EvaluationBasis()) == "dvc.lock does not record what this workspace was evaluated on"
    others = OtherRuns([alike, fewer, run(elsewhere, "RLOO", "ws-rloo")], own)
    assert others.comparable("") == [alike]
    assert [name for name, _ in others.left_out()] == ["ws-dpo (DPO)", "ws-rloo (RLOO)"]


def test_a_policy_does_not_stand_beside_itself_and_best_of_n_stands_once(tmp_path: Path, own: EvaluationBasis) -> None:
    best = run(replace(basis(tmp_path), policy=""), "best of 16")
    others = OtherRuns([run(basis(tmp_path, policy="p")), best, best], own)
    assert others.comparable("") == [best] and others.comparable("best of 16") == []
    assert others.left_out() == []


def test_a_file_is_read_as_it_was_written(tmp_path: Path, own: EvaluationBasis) -> None:
    path = tmp_path / "alternatives.json"
    assert read_alternatives(path) == []
    runs = [run(own), replace(run(own), gold=None, seed=None)]
    save_alternatives(path, runs)
    assert read_alternatives(path) == runs


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"format": 2, "runs": []}',
        '{"format": 1}',
        '{"format": 1, "runs": [{"workspace": "a"}]}',
        "no json",
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "alternatives.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"alternatives\.json") as refused:
        read_alternatives(path)
    assert "\n" not in str(refused.value)


def test_rows_have_quality_distance_and_cost(tmp_path: Path, own: EvaluationBasis) -> None:
    evaluation = {"sft": {"gold": 0.1, "length": 20.0}, "policy": {"gold": 0.5, "length": 22.0}, "kl": 1.5}
    histories = {"ppo": [{"length": 20.0, "seconds_update": 2.0}, {"length": 30.0, "seconds_update": 3.0}]}
    others = OtherRuns([run(basis(tmp_path))], own)
    sft, policy, dpo = alternatives(evaluation, "ppo", histories, others, batch_size=10, gate="passed")
    assert (sft["name"], sft["seconds"], sft["kl"]) == ("SFT", 0.0, 0.0)
    # Two iterations of 10 replies with 20 and 30 tokens.
    assert (policy["sampled_tokens"], policy["seconds"], policy["gate"]) == (500, 5.0, "passed")
    assert (dpo["name"], dpo["gold"], dpo["kl"], dpo["sampled"], dpo["seconds"]) == ("DPO", 0.4321, 3.25, 21.0, 12.5)
    assert (dpo["trained_tokens"], dpo["gate"], dpo["by_judge"]["win_rate"]) == (70000, "failed", 0.6123)
    assert alternatives(evaluation) == [], "there is but PPO"


@pytest.mark.parametrize(("text", "size"), [("ppo: {batch_size: 12}", 12), ("seed: 1", 128), ("a: [", None)])
def test_the_batch_size_is_that_of_params(text: str, size: int | None) -> None:
    from rlhf_core.config.ppo import PpoConfig

    assert ppo_batch_size(text) == (PpoConfig().batch_size if size == 128 else size)


def test_the_report_shows_them_and_names_what_it_leaves_out(tmp_path: Path, own: EvaluationBasis) -> None:
    fill(tmp_path)
    assert "Was PPO worth it?" not in render(tmp_path)
    runs = [
        run(basis(tmp_path), workspace=f"ws {ATTACK}"),
        run(replace(own, inputs={**own.inputs, "models/sft": "t"}), "RLOO", "ws-rloo"),
    ]
    save_alternatives(tmp_path / "alternatives.json", runs)
    page = render(tmp_path)
    assert "Was PPO worth it?" in page and '<th scope="row">DPO</th>' in page and "0.551 to 0.672" in page
    assert "70,000 trained on" in page and "c0ffee" in page and "ab" * 32 in page
    assert "ws-rloo (RLOO): another SFT model (models/sft)" in page and '<th scope="row">RLOO</th>' not in page
    write(tmp_path / "alternatives.json", json.dumps({"format": 9, "runs": [asdict(runs[0])]}))
    page = render(tmp_path)
    assert "Was PPO worth it?" not in page and "its format is 9, not 1" in page

"""A training stage killed with SIGKILL and run again ends like one that was never interrupted, bit
for bit.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from architecture.glossary import undocumented
from ranks import exit_code_of
from unit.training.tiny import SHAPE, run_and_die, run_stage, without_clock

from rlhf_core.api.sft import train_sft
from rlhf_core.config.base import SftConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.data.schema import Demonstration, Message
from rlhf_core.data.tokens import TokenTable
from rlhf_core.models.causal_lm import fitting_length, load_policy
from rlhf_core.stages.reward import MOST_MISTAKES
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.history import read_history
from rlhf_core.training.run_context import RunContext


@pytest.fixture(scope="module")
def whole(workspace: Path) -> dict[str, dict[str, object]]:
    """Metrics of the stages run without interruption, their files under NAME-whole."""
    return {name: run_stage(name, workspace, f"{name}-whole") for name in ("sft", "reward")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward"])
def test_killed_run_ends_as_the_uninterrupted_one(
    name: str, workspace: Path, whole: dict[str, dict[str, object]]
) -> None:
    # Step 5 lies between the checkpoint at 3, the evaluation at 4 and the checkpoint at 6.
    assert exit_code_of(run_and_die, name, workspace, f"{name}-killed", 5, "step-000003") == -9
    work = workspace / f"{name}-killed/work"
    assert [path.name for path in (work / "checkpoints").glob("step-*")] == ["step-000003"]
    assert read_history(work / "history.jsonl")[-1]["step"] == 4

    resumed = run_stage(name, workspace, f"{name}-killed")

    for file in (f"models/{name}/model.safetensors", f"models/{name}/tokenizer.json"):
        assert sha256_file(workspace / f"{name}-killed" / file) == sha256_file(
            workspace / f"{name}-whole" / file
        )
    histories = [workspace / f"{name}-{kind}/history/{name}.jsonl" for kind in ("killed", "whole")]
    assert without_clock(histories[0]) == without_clock(histories[1])
    assert [record["step"] for record in read_history(histories[0])] == [0, 3, 4, 6, 8]
    assert {k: v for k, v in resumed.items() if k != "tokens_per_second"} == {
        k: v for k, v in whole[name].items() if k != "tokens_per_second"
    }


def test_killed_critic_pretraining_ends_as_the_uninterrupted_one(workspace: Path) -> None:
    whole = run_stage("critic", workspace, "critic-whole")
    # Four steps a rollout: step 9 is in the middle of the third one's first epoch, after the
    # checkpoint of the second.
    assert exit_code_of(run_and_die, "critic", workspace, "critic-killed", 9, "step-000002") == -9
    work = workspace / "critic-killed/work"
    assert [path.name for path in (work / "checkpoints").glob("step-*")] == ["step-000002"]

    resumed = run_stage("critic", workspace, "critic-killed")

    for file in ("model.safetensors", "tokenizer.json", "reward_moments.json"):
        one, other = (
            workspace / f"critic-{kind}/models/critic" / file for kind in ("killed", "whole")
        )
        assert sha256_file(one) == sha256_file(other), file
    rows = [
        without_clock(workspace / f"critic-{kind}/history/critic.jsonl")
        for kind in ("killed", "whole")
    ]
    assert rows[0] == rows[1] and [row["iteration"] for row in rows[0]] == [1, 2, 3, 4, 5]
    assert resumed == whole


def test_reward_outputs_are_what_a_user_expects(
    workspace: Path, whole: dict[str, dict[str, object]]
) -> None:
    out, metrics = workspace / "reward-whole", whole["reward"]
    assert undocumented("history/reward.jsonl", read_history(out / "history/reward.jsonl")) == set()
    assert json.loads((out / "metrics/reward.json").read_text()) == metrics
    assert {path.name for path in (out / "plots/reward").iterdir()} == {
        "margins.svg",
        "calibration.svg",
    }
    mistakes = [
        json.loads(line)
        for line in (out / "samples/reward_mistakes.jsonl").read_text().splitlines()
    ]
    assert all(row["margin"] < 0 for row in mistakes) and len(mistakes) <= MOST_MISTAKES
    assert bool(mistakes) == (metrics["test_accuracy"] < 1.0)  # type: ignore[operator]
    expected = {
        "accuracy",
        "margin_mean",
        "margin_std",
        "ece",
        "length_correlation",
        "accuracy_shorter_preferred",
    }
    assert expected | {f"test_{key}" for key in expected} | {
        "baseline_longer",
        "baseline_bow",
    } <= set(metrics)
    assert set(metrics["category"]) == {"fact", "howto"}  # type: ignore[call-overload]


def test_sft_improves_perplexity_and_shows_samples(
    workspace: Path, whole: dict[str, dict[str, object]]
) -> None:
    metrics = whole["sft"]
    assert (
        undocumented("history/sft.jsonl", read_history(workspace / "sft-whole/history/sft.jsonl"))
        == set()
    )
    assert metrics["perplexity"] < metrics["perplexity_before"]  # type: ignore[operator]
    lines = (workspace / "sft-whole/samples/sft.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert set(json.loads(lines[0])) == {"prompt", "reply", "finished", "reference", "category"}


def test_the_models_positions_bound_training(
    workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load_policy(workspace / "models/base")
    assert (
        fitting_length(1024, model)
        == fitting_length(1024, workspace / "models/base")
        == SHAPE.max_positions
    )
    assert fitting_length(100, model) == 100
    rows = [
        Demonstration(
            str(i), [Message("user", "the sky")], "very big " * words, "fact", "test", str(i)
        )
        for i, words in enumerate((3, 4, 200, 5, 300))
    ]
    config = SftConfig(steps=1, batch_size=2, max_tokens=1024, optimizer=OptimizerConfig(lr=1e-3))
    with caplog.at_level(logging.WARNING):
        tokens, checks = (
            TokenTable.of_rows(tokenizer, Demonstration.KIND, part) for part in (rows, rows[:1])
        )
        context = RunContext(tmp_path / "work")
        trained = train_sft(
            model,
            tokenizer,
            tokens,
            validation=checks,
            config=config,
            context=context,
            allow_high_learning_rates=True,
        )
    assert trained.metrics["dropped_over_long"] == 2 and trained.metrics["train_rows"] == 3
    assert f"2 of 5 demonstrations are longer than {SHAPE.max_positions} tokens" in caplog.text

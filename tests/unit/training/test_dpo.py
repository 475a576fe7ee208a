"""DPO: the loss against published and hand-computed numbers, log-probabilities, gradients,
resuming, adapters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture.glossary import undocumented
from ranks import run_ranks
from transformers import PreTrainedModel
from unit.ppo.tiny import Interrupting
from unit.training.tiny import stage_paths, without_clock

from rlhf_core.config.policy import CriticStageConfig, DpoConfig, PolicyStageConfig
from rlhf_core.data.batches import TokenisedPair
from rlhf_core.data.schema import Preference, read_rows
from rlhf_core.data.tokens import pad_id
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.runtime import distributed
from rlhf_core.stages import critic, policy_by_dpo
from rlhf_core.storage.files import sha256_file
from rlhf_core.tracking.stage_run import Tracker
from rlhf_core.training.dpo import (
    DpoTask,
    all_logprobs,
    batch_logprobs,
    dpo_loss,
    implicit_rewards,
    reference_logprobs,
    scoring_rows,
)
from rlhf_core.training.engine.base import LocalEngine
from rlhf_core.training.history import read_history
from rlhf_core.training.reward.run import Split, split_of
from rlhf_core.training.run_context import RunContext

POLICY = torch.tensor([[-10.0, -22.5, -7.25], [-14.0, -20.0, -9.5]])
REFERENCE = torch.tensor([[-12.0, -21.0, -7.0], [-13.0, -21.5, -8.0]])
SETTINGS: dict[str, Any] = {
    "steps": 8, "batch_size": 8, "eval_every": 4, "samples": 2, "optimizer": {"lr": 1e-2}, "checkpoint": {"every": 3},
}  # fmt: skip


def test_the_loss_of_one_pair_is_equation_7() -> None:
    # Log-ratios 2 and -1: with beta 0.1 the margin is 0.3, and -log sigmoid(0.3) = log(1 +
    # exp(-0.3)).
    rewards = implicit_rewards(POLICY, REFERENCE, 0.1)[:, :1]
    assert float(dpo_loss(rewards, 0.0, 1)) == pytest.approx(math.log1p(math.exp(-0.3)))
    assert float(dpo_loss(torch.zeros(2, 4), 0.0, 4)) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("beta", "label_smoothing", "losses", "chosen", "rejected"),
    [
        (
            0.1,
            0.0,
            [0.554355244469, 0.854355244469, 0.632599035317],
            [0.2, -0.15, -0.025],
            [-0.1, 0.15, -0.15],
        ),
        (
            0.5,
            0.0,
            [0.201413277983, 1.701413277983, 0.428700678277],
            [1.0, -0.75, -0.125],
            [-0.5, 0.75, -0.75],
        ),
        (
            0.1,
            0.2,
            [0.614355244469, 0.794355244469, 0.657599035317],
            [0.2, -0.15, -0.025],
            [-0.1, 0.15, -0.15],
        ),
    ],
)
def test_the_loss_is_that_of_trl(
    beta: float,
    label_smoothing: float,
    losses: list[float],
    chosen: list[float],
    rejected: list[float],
) -> None:
    """Constants: DPOTrainer.dpo_loss of TRL 0.24.0, loss_type "sigmoid", on the same
    log-probabilities in float64.
    """
    implicit = implicit_rewards(POLICY, REFERENCE, beta)
    each = [float(dpo_loss(implicit[:, row : row + 1], label_smoothing, 1)) for row in range(3)]
    assert each == pytest.approx(losses, abs=1e-6)
    assert float(dpo_loss(implicit, label_smoothing, 3)) == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert implicit.flatten().tolist() == pytest.approx([*chosen, *rejected], abs=1e-6)


def test_the_gradient_pushes_most_where_the_implicit_reward_is_wrong() -> None:
    # Rafailov et al., section 4: beta * sigmoid(r_l - r_w) weighs the gradient of the
    # log-probabilities.
    policy = POLICY.clone().requires_grad_(True)
    rewards = implicit_rewards(policy, REFERENCE, 0.5)
    dpo_loss(rewards, 0.0, 3).backward()
    expected = -0.5 * torch.sigmoid(rewards[1] - rewards[0]) / 3
    assert policy.grad is not None and torch.allclose(
        policy.grad, torch.stack([expected, -expected])
    )


def test_label_smoothing_has_its_minimum_at_the_log_odds() -> None:
    rewards = torch.tensor([[math.log(0.9 / 0.1)], [0.0]], requires_grad=True)
    dpo_loss(rewards, 0.1, 1).backward()
    assert rewards.grad is not None and rewards.grad.flatten().tolist() == pytest.approx(
        [0.0, 0.0], abs=1e-7
    )


class Fixture:
    """The tiny workspace's SFT model, tokenizer and pairs."""

    def __init__(self, root: Path) -> None:
        self.model, self.tokenizer = load_policy(root / "models/sft")
        self.pad = pad_id(self.tokenizer)
        rows = read_rows(root / "data/clean/preferences/train.parquet", Preference)
        self.train: Split = split_of(rows, self.tokenizer, 256, "train")


@pytest.fixture(scope="module")
def loaded(workspace: Path) -> Fixture:
    return Fixture(workspace)


def by_hand(model: PreTrainedModel, prompt: Sequence[int], reply: Sequence[int]) -> float:
    """The log-probability of one unpadded reply from the model's own logits."""
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + t, token]) for t, token in enumerate(reply))


def test_logprobs_are_sums_over_reply_tokens_whatever_the_padding(loaded: Fixture) -> None:
    pairs = loaded.train.pairs[:9]
    expected = [
        [by_hand(loaded.model, p.prompt, reply) for p in pairs for reply in (p.chosen, p.rejected)]
    ]
    for size in (2, 64):
        values = all_logprobs(loaded.model, pairs, loaded.pad, size)
        assert values.t().flatten().tolist() == pytest.approx(expected[0], abs=1e-4)
    with torch.no_grad():
        batch = batch_logprobs(loaded.model, pairs, loaded.pad)[0]
        chunked = batch_logprobs(loaded.model, pairs, loaded.pad, logits_bytes=4 * 300 * 10)[0]
    assert torch.allclose(batch.double(), values, atol=1e-4) and torch.allclose(
        batch, chunked, atol=1e-5
    )


def test_the_reference_is_computed_once_and_for_the_pairs_that_are_used(
    loaded: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reference.safetensors"
    first = reference_logprobs(loaded.model, loaded.train.pairs, {1, 4}, loaded.pad, file)
    assert (~first[0].isnan()).nonzero().flatten().tolist() == [1, 4]
    monkeypatch.setattr("rlhf_core.training.dpo.all_logprobs", pytest.fail)
    again = reference_logprobs(loaded.model, loaded.train.pairs, {1, 4}, loaded.pad, file)
    assert torch.equal(again.nan_to_num(), first.nan_to_num())


def task(loaded: Fixture, model: PreTrainedModel, tmp_path: Path, **settings: Any) -> DpoTask:
    config = DpoConfig.model_validate(SETTINGS | settings)
    pairs: list[TokenisedPair] = loaded.train.pairs
    reference = reference_logprobs(
        loaded.model, pairs, range(len(pairs)), loaded.pad, tmp_path / "reference.safetensors"
    )
    engine = LocalEngine(model, config.optimizer, config.steps, "dpo")
    return DpoTask(engine, model, pairs, pairs[:20], (reference, reference), config, 1, loaded.pad)


def test_training_begins_at_log_2_in_any_micro_batches(
    loaded: Fixture, workspace: Path, tmp_path: Path
) -> None:
    gradients = []
    for micro in (None, 3):
        model, _ = load_policy(workspace / "models/sft")
        one = task(loaded, model, tmp_path, micro_batch_size=micro)
        report = one.train_step(0)
        assert report.metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert gradients[0] and max(float(g.abs().max()) for g in gradients[0]) > 1e-4
    for whole, parts in zip(*gradients, strict=True):
        assert torch.allclose(whole, parts, atol=1e-6)


def test_before_training_every_pair_is_a_tie_that_counts_half(
    loaded: Fixture, workspace: Path, tmp_path: Path
) -> None:
    model, _ = load_policy(workspace / "models/sft")
    one = task(loaded, model, tmp_path)
    one.validation_reference = all_logprobs(
        model, one.validation, one.pad, scoring_rows(one.config), one.logits_bytes
    )
    measured = one.evaluate(one.model)
    assert (measured["accuracy"], measured["margin"]) == (0.5, 0.0)


def test_length_normalised_rewards_are_means_over_tokens(
    loaded: Fixture, workspace: Path, tmp_path: Path
) -> None:
    model, _ = load_policy(workspace / "models/base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    plain, normalised = (
        task(loaded, model, tmp_path, length_normalized=on) for on in (False, True)
    )
    pairs = [loaded.train.pairs[row] for row in range(5)]
    lengths = torch.tensor([float(len(pair.chosen)) for pair in pairs])
    policy = batch_logprobs(model, pairs, plain.pad)[0]
    sums, means = (
        one.rewards(pairs, policy, one.train_reference[:, :5])[0].detach()
        for one in (plain, normalised)
    )
    assert float(sums.abs().max()) > 1e-3 and torch.allclose(means, sums / lengths, atol=1e-6)


def train(
    workspace: Path, out: Path, tracker: Tracker | None = None, **policy: Any
) -> dict[str, Any]:
    """Run the stage that trains the policy, with method dpo."""
    config = PolicyStageConfig.model_validate(
        {"policy": {"method": "dpo", "dpo": SETTINGS}, "max_new_tokens": 6} | policy
    )
    context = RunContext(out / "work", tracker or Tracker())
    stage = policy_by_dpo.STAGE
    return dict(stage.run(config, *stage_paths(stage, workspace, out), context))


@pytest.fixture(scope="module")
def trained(
    workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("dpo")
    return out, train(workspace, out)


def test_the_stage_writes_what_ppo_writes_and_learns_the_pairs(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    out, metrics = trained
    assert metrics == json.loads((out / "metrics/ppo.json").read_text())
    assert metrics["method"] == "dpo" and metrics["steps"] == 8
    # Chosen replies say "good", rejected ones "bad".
    assert (
        metrics["validation_loss"]
        < 0.6
        < metrics["validation_loss_before"]
        == pytest.approx(math.log(2), abs=1e-4)
    )
    assert metrics["validation_accuracy"] > 0.9 and metrics["train_tokens"] > 0
    rows = read_history(out / "history/ppo.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 4, 6, 8]
    assert (
        undocumented("history/ppo.jsonl", rows)
        == undocumented("metrics/ppo.json", [metrics])
        == set()
    )
    assert len((out / "samples/ppo.jsonl").read_text().splitlines()) == 2
    assert (out / "history/ppo_abandoned.jsonl").read_text() == ""
    assert not list((out / "models").glob("critic"))


def test_an_interrupted_run_ends_alike(
    workspace: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(workspace, tmp_path, Interrupting(6))
    train(workspace, tmp_path)
    one, other = (folder / "models/policy/model.safetensors" for folder in (trained[0], tmp_path))
    assert sha256_file(one) == sha256_file(other)
    assert without_clock(trained[0] / "history/ppo.jsonl") == without_clock(
        tmp_path / "history/ppo.jsonl"
    )


def test_adapters_are_merged_into_a_plain_model(workspace: Path, tmp_path: Path) -> None:
    metrics = train(workspace, tmp_path, policy_lora={"rank": 4, "alpha": 8})
    assert metrics["validation_loss_before"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["validation_loss"] < metrics["validation_loss_before"]
    sft, policy = (
        load_policy(root / "models" / name)[0].state_dict()
        for root, name in ((workspace, "sft"), (tmp_path, "policy"))
    )
    assert sft.keys() == policy.keys() and any(
        not torch.equal(sft[name], policy[name]) for name in sft
    )


def test_the_critic_stage_trains_nothing_and_says_why(workspace: Path, tmp_path: Path) -> None:
    config = CriticStageConfig.model_validate({"policy": {"method": "dpo"}})
    paths = stage_paths(critic.STAGE, tmp_path / "nothing is read", tmp_path)
    metrics = critic.STAGE.run(config, *paths, RunContext(tmp_path / "work"))
    assert metrics["reason"] == "no critic is trained: policy.method dpo needs none"
    assert [path.name for path in (tmp_path / "models/critic").iterdir()] == ["not_trained.json"]


def resumed_on_ranks(folder: Path, workspace: Path) -> None:
    """Rank 0 keeps its partial state, and the other one begins with an empty folder at every
    attempt.
    """
    model, tokenizer = load_policy(workspace / "models/base")
    rows = read_rows(workspace / "data/clean/preferences/train.parquet", Preference)
    pairs = split_of(rows, tokenizer, 128, "pairs").pairs
    own = folder / f"of rank {distributed.rank()}"
    first = reference_logprobs(model, pairs, {1, 4}, pad_id(tokenizer), own / "first.safetensors")
    if not distributed.is_rank_zero():
        own = folder / "new"
    again = reference_logprobs(model, pairs, {1, 4}, pad_id(tokenizer), own / "first.safetensors")
    assert torch.equal(again.nan_to_num(), first.nan_to_num()) and not (folder / "new").exists()


def test_ranks_resume_with_the_reference_of_the_first(workspace: Path, tmp_path: Path) -> None:
    run_ranks(resumed_on_ranks, 2, tmp_path, workspace)

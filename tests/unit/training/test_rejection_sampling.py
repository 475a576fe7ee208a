"""Rejection sampling: the best finished reply to each prompt, kept across interruptions, and
training on it.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture.glossary import undocumented
from unit.training.tiny import stage_paths

from rlhf_core.config.policy import PolicyStageConfig
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_prompt
from rlhf_core.errors import DataError
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.ppo import rejection_sampling
from rlhf_core.ppo.rejection_sampling import RejectionSampler, best_of_each_prompt
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler
from rlhf_core.stages import policy_by_rejection_sampling
from rlhf_core.storage.files import sha256_file
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import read_history
from rlhf_core.training.run_context import RunContext

SETTINGS: dict[str, Any] = {
    "replies_per_prompt": 4, "prompts": 40, "steps": 6, "batch_size": 8, "eval_every": 3,
    "optimizer": {"lr": 3e-3}, "checkpoint": {"every": 3},
}  # fmt: skip


def test_the_best_is_the_first_of_the_highest_reward_among_those_that_ended() -> None:
    rewards = [0.1, 0.9, 0.5, 0.5, 2.0, 3.0]
    finished = [True, False, True, True, False, False]
    assert best_of_each_prompt(rewards, finished, 2) == [0, 2, None]
    assert best_of_each_prompt(rewards, [True] * 6, 3) == [1, 5]


def test_a_reward_that_is_not_finite_is_never_the_best() -> None:
    assert best_of_each_prompt(
        [math.nan, 0.5, math.inf, -1.0, math.nan, -math.inf], [True] * 6, 2
    ) == [1, 3, None]


def sampler(workspace: Path, work: Path, new_tokens: int = 40) -> RejectionSampler:
    """The tiny SFT model's replies, rewarded by their length."""
    policy, tokenizer = load_policy(workspace / "models/sft")
    turns = [[Message("user", text)] for text in ("red", "blue", "a tree is very big", "green")]
    return RejectionSampler(
        sampler=LocalSampler.of(policy),
        reward_fn=lambda batch: batch.response_mask.sum(dim=1).float(),
        prompts=TrainingPrompts(turns, [encode_prompt(tokenizer, turn) for turn in turns]),
        sampling=Sampling.for_tokenizer(tokenizer, new_tokens),
        replies_per_prompt=16,
        batch_size=None,
        seed=3,
        frozen=FrozenModels(),
        work=work,
        preemption=PreemptionSignal(),
    )


def test_parts_change_no_reply_or_are_made_twice(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sampler(workspace, tmp_path / "whole").best_replies([2, 0, 3])
    assert set(whole.prompts) <= {2, 0, 3} and whole.sampled_replies == 48
    assert [len(reply) for reply in whole.replies] == whole.rewards
    monkeypatch.setattr(rejection_sampling, "PROMPTS_AT_ONCE", 1)
    parts = sampler(workspace, tmp_path / "parts").best_replies([2, 0, 3])
    assert (parts.prompts, parts.replies) == (whole.prompts, whole.replies)
    assert parts.sampled_tokens == whole.sampled_tokens
    monkeypatch.setattr(rejection_sampling, "sample_replies", pytest.fail)
    assert sampler(workspace, tmp_path / "parts").best_replies([2, 0, 3]) == parts


def test_rewards_that_are_not_finite_end_no_run(workspace: Path, tmp_path: Path) -> None:
    whole, broken = (sampler(workspace, tmp_path / name) for name in ("whole", "broken"))
    broken.reward_fn = lambda batch: (
        batch.response_mask.sum(dim=1).float().index_fill(0, torch.tensor([0]), math.nan)
    )
    expected, best = whole.best_replies([2, 0, 3]), broken.best_replies([2, 0, 3])
    assert (
        all(math.isfinite(reward) for reward in best.rewards) and best.prompts == expected.prompts
    )
    assert (best.sampled_replies, best.unrewarded_replies, expected.unrewarded_replies) == (
        48,
        1,
        0,
    )
    assert 0 < expected.sampled_rewards - best.sampled_rewards <= 40
    assert broken.best_replies([2, 0, 3]) == best


def test_replies_that_never_end_are_an_error_that_says_so(workspace: Path, tmp_path: Path) -> None:
    endless = sampler(workspace, tmp_path, new_tokens=2)
    object.__setattr__(endless.sampling, "min_new_tokens", 2)
    with pytest.raises(
        DataError, match=r"none of 16 replies to each of 2 prompts ended within 2 tokens"
    ):
        endless.best_replies([0, 1])


def train(workspace: Path, out: Path, **changes: Any) -> dict[str, Any]:
    stage = policy_by_rejection_sampling.STAGE
    policy = {"method": "rejection_sampling", "rejection_sampling": SETTINGS}
    config = PolicyStageConfig.model_validate({"policy": policy, "max_new_tokens": 40} | changes)
    return dict(stage.run(config, *stage_paths(stage, workspace, out), RunContext(out / "work")))


def test_the_stage_writes_what_ppo_writes_and_is_the_same_after_a_resume(
    workspace: Path, tmp_path: Path
) -> None:
    metrics = train(workspace, tmp_path)
    assert metrics["reward_kept"] > metrics["reward_sampled"] and metrics["replies_per_prompt"] == 4
    assert metrics["validation_loss"] < metrics["validation_loss_before"]
    rows = read_history(tmp_path / "history/ppo.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 6] and rows[0]["sampled_tokens"] == metrics[
        "sampled_tokens"
    ] > 0
    assert (
        undocumented("history/ppo.jsonl", rows)
        == undocumented("metrics/ppo.json", [metrics])
        == set()
    )
    sample = json.loads((tmp_path / "samples/ppo.jsonl").read_text().splitlines()[0])
    assert sample["prompt"][-1]["role"] == "user" and sample["reply"]
    sft, policy = (
        load_policy(root / "models" / name)[0].state_dict()
        for root, name in ((workspace, "sft"), (tmp_path, "policy"))
    )
    assert any(not torch.equal(sft[name], policy[name]) for name in sft)
    before = sha256_file(tmp_path / "models/policy/model.safetensors")
    (
        tmp_path / "work/best_replies/00000032.json"
    ).unlink()  # as if it had been interrupted in sampling
    for checkpoint in (tmp_path / "work/checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    train(workspace, tmp_path)
    assert sha256_file(tmp_path / "models/policy/model.safetensors") == before

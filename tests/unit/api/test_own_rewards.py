"""Rewards by a function through a whole run: columns, replies that cannot be scored, and the other
functions that take one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length

import rlhf_core as rlhf
from rlhf_core.config.ppo import AdvantageConfig, KlConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.advantages import (
    advantages_of_scored,
    group_relative_advantages,
    leave_one_out_advantages,
)

RECORDS = [{"prompt": question, "answer": str(number)} for number, question in enumerate(QUESTIONS)]
PAIRS = [{"prompt": f"the sky {n}", "chosen": "is blue", "rejected": "red"} for n in range(8)]
CONFIG = rlhf.PpoConfig(**PPO | CRITIC_FREE | {"iterations": 2})


def by_answer(prompts: Any, replies: list[str], answer: list[str]) -> list[float]:
    asked = [QUESTIONS.index(prompt[-1]["content"]) for prompt in prompts]
    assert answer == [str(number) for number in asked]
    return [float(len(reply)) for reply in replies]


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.cpu(), b.cpu())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_columns_reach_the_function_by_name_in_critic_and_ppo(llama: LanguageModel) -> None:
    rollout, critic = rlhf.PpoConfig(**PPO).rollout, rlhf.CriticConfig(max_rollouts=1, batch_size=4)
    trained = rlhf.train_critic(*llama, RECORDS, by_answer, rollout=rollout, config=critic)
    config = rlhf.PpoConfig(**PPO | {"iterations": 1})
    policy = rlhf.train_ppo(*llama, RECORDS, by_answer, trained, config=config)
    assert policy.history[0]["reward_std"] > 0


def test_what_the_function_asks_for_must_be_there_and_be_one(llama: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="by_answer asks for answer, which"):
        rlhf.train_ppo(*llama, QUESTIONS, by_answer, config=CONFIG)
    twice = [*RECORDS, RECORDS[2] | {"answer": "other"}]
    with pytest.raises(
        DataError, match="record 13 repeats the prompt of record 3 with another answer"
    ):
        rlhf.train_ppo(*llama, twice, by_answer, config=CONFIG)
    assert rlhf.train_ppo(*llama, twice, by_length, config=CONFIG).history  # it reads no answer


def test_other_answers_are_another_run(llama: LanguageModel, tmp_path: Path) -> None:
    context = rlhf.RunContext(tmp_path / "run")
    rlhf.train_ppo(*llama, RECORDS, by_answer, config=CONFIG, context=context)
    others = [record | {"level": 1} for record in RECORDS]
    with pytest.raises(rlhf.RlhfError, match="namely prompts"):
        rlhf.train_ppo(*llama, others, by_answer, config=CONFIG, context=context)


def test_nothing_is_learned_from_a_reply_that_cannot_be_scored(llama: LanguageModel) -> None:
    def picky(prompts: Any, replies: list[str]) -> list[float | None]:
        return [1.0 if len(reply) % 2 else None for reply in replies]

    # The replies that are scored are worth the same, so that only the others could move the policy.
    config = CONFIG.model_copy(update={"kl": KlConfig(coefficient=0.0), "batch_size": 16})
    policy = rlhf.train_ppo(*llama, QUESTIONS, picky, config=config)
    assert same(policy.model, llama[0])
    assert all(0 < row["unscored"] < 1 and row["reward_mean"] == 1.0 for row in policy.history)


def test_what_can_be_scored_is_learned_from_and_all_metrics_are_numbers(
    llama: LanguageModel,
) -> None:
    def picky(prompts: Any, replies: list[str]) -> list[float | None]:
        return [None if len(reply) % 3 == 0 else float(len(reply)) for reply in replies]

    config = rlhf.PpoConfig(**PPO | {"iterations": 2, "batch_size": 12})
    critic = rlhf.train_critic(
        *llama,
        QUESTIONS,
        picky,
        rollout=config.rollout,
        config=rlhf.CriticConfig(max_rollouts=1, batch_size=12),
    )
    policy = rlhf.train_ppo(*llama, QUESTIONS, picky, critic, config=config)
    assert not same(policy.model, llama[0])
    numbers = [
        value for row in policy.history for value in row.values() if not isinstance(value, list)
    ]
    assert None not in numbers and all(math.isfinite(value) for value in numbers)


def test_a_rollout_without_any_score_ends_the_run(llama: LanguageModel) -> None:
    def never(prompts: Any, replies: list[str]) -> list[None]:
        return [None for _ in replies]

    with pytest.raises(DataError, match="could score 0 of the 4 replies"):
        rlhf.train_ppo(*llama, QUESTIONS, never, config=CONFIG)


@pytest.mark.parametrize(
    "config",
    [
        AdvantageConfig(estimator="rloo"),
        AdvantageConfig(estimator="grpo"),
        AdvantageConfig(estimator="grpo", divide_by_std=False),
    ],
)
def test_groups_are_compared_over_the_replies_that_were_scored(config: AdvantageConfig) -> None:
    rewards = torch.tensor([[1.0, 9.0, 4.0, 2.0], [3.0, 9.0, 9.0, 9.0], [1.0, 2.0, 3.0, 9.0]])
    scored = torch.tensor(
        [[True, False, True, True], [True, False, False, False], [True, True, True, True]]
    )
    found = advantages_of_scored(rewards, scored, config)

    def plain(group: torch.Tensor) -> torch.Tensor:
        if config.estimator == "rloo":
            return leave_one_out_advantages(group[None])[0]
        return group_relative_advantages(group[None], config.divide_by_std)[0]

    torch.testing.assert_close(found[0][scored[0]], plain(rewards[0][scored[0]]))
    torch.testing.assert_close(found[2], plain(rewards[2]))
    assert not found[1].any() and not found[0, 1]


def test_policies_are_compared_by_a_function_and_by_a_model(
    llama: LanguageModel, tmp_path: Path
) -> None:
    model, tokenizer = llama
    compared = rlhf.compare_policies(model, model, tokenizer, RECORDS, by_answer)
    assert compared.metrics["win_rate"] == 0.5 and compared.metrics["tie"] == 1.0
    assert compared.metrics["prompts"] == len(RECORDS) == len(compared.rows)
    pairs = [
        {"prompt": question, "chosen": "red", "rejected": "blue blue"} for question in QUESTIONS
    ]
    other = rlhf.train_sft(
        model,
        tokenizer,
        [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs],
        config=rlhf.SftConfig(steps=60, batch_size=4, max_tokens=64),
    )

    def short(prompts: Any, replies: list[str]) -> list[float]:
        return [-float(len(reply)) for reply in replies]

    one = rlhf.compare_policies(other.model, model, tokenizer, QUESTIONS, short).metrics
    swapped = rlhf.compare_policies(model, other.model, tokenizer, QUESTIONS, short).metrics
    assert one["win_rate"] + swapped["win_rate"] == pytest.approx(1.0)
    assert one["mean_difference"] == pytest.approx(-swapped["mean_difference"]) != 0
    judge = rlhf.ScalarModel.from_causal_lm(model, 5)
    judge.save(tmp_path / "judge", tokenizer)
    by_model = rlhf.compare_policies(other.model, model, tokenizer, QUESTIONS, judge)
    by_folder = rlhf.compare_policies(other.model, model, tokenizer, QUESTIONS, tmp_path / "judge")
    assert by_model.metrics == by_folder.metrics

    def half(prompt: Any, reply: str) -> float | None:
        return None if prompt[-1]["content"] == QUESTIONS[0] else 1.0

    partly = rlhf.compare_policies(
        model, model, tokenizer, QUESTIONS, rlhf.FunctionReward(half, call="single")
    )
    assert partly.metrics["unscored"] == 1 and partly.rows[0]["score_candidate"] is None
    with pytest.raises(ConfigError, match="judge is a str"):
        rlhf.compare_policies(model, model, tokenizer, QUESTIONS, "gpt")  # type: ignore[arg-type]


def test_dpo_prefers_the_chosen_replies_and_leaves_the_model(
    llama: LanguageModel, tmp_path: Path
) -> None:
    before = [parameter.detach().clone() for parameter in llama[0].parameters()]
    policy = rlhf.train_dpo(
        *llama, PAIRS, config=rlhf.DpoConfig(steps=20, batch_size=4, max_tokens=64)
    )
    assert policy.metrics["validation_loss"] < policy.metrics["validation_loss_before"]
    assert all(
        torch.equal(one, own) for one, own in zip(before, llama[0].parameters(), strict=True)
    )
    policy.save(tmp_path / "policy")
    with pytest.raises(rlhf.RlhfError, match="namely lora"):
        for lora in (None, rlhf.LoraConfig(rank=2)):
            config = rlhf.DpoConfig(steps=1, batch_size=4, max_tokens=64)
            context = rlhf.RunContext(tmp_path / "run")
            rlhf.train_dpo(*llama, PAIRS, config=config, lora=lora, context=context)


def test_a_missing_tokenizer_is_named(llama: LanguageModel) -> None:
    none: Any = None
    for call in (
        lambda: rlhf.train_sft(llama[0], none, PAIRS),
        lambda: rlhf.train_dpo(llama[0], none, PAIRS),
        lambda: rlhf.train_ppo(llama[0], none, QUESTIONS, by_length, config=CONFIG),
        lambda: rlhf.compare_policies(llama[0], llama[0], none, QUESTIONS, by_length),
    ):
        with pytest.raises(ConfigError, match="tokenizer is None; give the model's own"):
            call()

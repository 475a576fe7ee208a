"""What is left of a training that ends early: the error has it, and says what is kept on disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length

import rlhf_core as rlhf
from rlhf_core.config.health import RuleChange
from rlhf_core.errors import DataError

Reward = Callable[..., list[Any]]
ALARMED = rlhf.HealthConfig(
    rules={
        "kl_over_budget": RuleChange(action="pause", threshold=-1e9, window=1, after=2),
        "kl_negative": RuleChange(threshold=1e9, window=1, after=4),
    }
)


def settings(**changes: Any) -> rlhf.PpoConfig:
    return rlhf.PpoConfig(**PPO | CRITIC_FREE | {"iterations": 8} | changes)


def failing_late(after: int, what: Callable[[], Any]) -> Reward:
    calls = iter(range(100))

    def reward(prompts: Any, replies: list[str]) -> list[float]:
        return [what() if next(calls) >= after * 4 else float(len(reply)) for reply in replies]

    return reward


def interrupt() -> float:
    raise KeyboardInterrupt


def moved(policy: Any, model: Any) -> bool:
    pairs = zip(policy.parameters(), model.parameters(), strict=True)
    return any(not torch.equal(one.detach().cpu(), other.detach().cpu()) for one, other in pairs)


@pytest.mark.parametrize(
    ("reward", "config", "error", "iterations"),
    [
        (by_length, settings(health=ALARMED), rlhf.TrainingPaused, 2),
        (failing_late(2, lambda: math.nan), settings(), DataError, 2),
        (failing_late(1, lambda: 1 / 0), settings(), DataError, 1),
    ],
)
def test_an_error_has_the_policy_until_then(
    reward: Reward,
    config: rlhf.PpoConfig,
    error: type[rlhf.RlhfError],
    iterations: int,
    llama: LanguageModel,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match="attribute trained of this exception") as caught:
        rlhf.train_ppo(*llama, QUESTIONS, reward, config=config)
    policy = caught.value.trained
    assert isinstance(policy, rlhf.TrainedPolicy) and len(policy.history) == iterations
    assert moved(policy.model, llama[0]) and "is kept in" not in str(caught.value)
    assert bool(policy.findings) == (error is rlhf.TrainingPaused)
    policy.save(tmp_path / "policy")


def test_a_pause_with_a_folder_names_what_is_kept_there(
    llama: LanguageModel, tmp_path: Path
) -> None:
    context = rlhf.RunContext(tmp_path / "run")
    with pytest.raises(
        rlhf.TrainingPaused, match="The checkpoint of iteration 1 is kept in"
    ) as caught:
        rlhf.train_ppo(
            *llama, QUESTIONS, by_length, config=settings(health=ALARMED), context=context
        )
    assert len(caught.value.trained.history) == 2 and "attribute trained" not in str(caught.value)
    assert any((tmp_path / "run/checkpoints").iterdir())


def test_nothing_is_promised_where_nothing_was_saved(llama: LanguageModel, tmp_path: Path) -> None:
    config = settings(health=ALARMED, checkpoint={"every": 5})
    with pytest.raises(rlhf.TrainingPaused) as caught:
        rlhf.train_ppo(
            *llama, QUESTIONS, by_length, config=config, context=rlhf.RunContext(tmp_path / "run")
        )
    assert "is kept" not in str(caught.value)


def test_who_interrupts_a_run_keeps_what_it_made(llama: LanguageModel) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        rlhf.train_ppo(*llama, QUESTIONS, failing_late(1, interrupt), config=settings())
    assert len(caught.value.trained.history) == 1  # type: ignore[attr-defined]
    assert "attribute trained" in caught.value.__notes__[0]


def test_the_other_trainings_keep_model_and_history(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_core.training.engine.base import LocalEngine

    made = LocalEngine.apply

    def apply(engine: LocalEngine, grad_norm: float, scale: float) -> Any:
        return made(engine, grad_norm if engine.steps < 3 else math.nan, scale)

    monkeypatch.setattr(LocalEngine, "apply", apply)
    rows = [{"prompt": f"the sky {n}", "completion": "is blue"} for n in range(6)]
    pairs = [{"prompt": f"the sky {n}", "chosen": "is blue", "rejected": "red"} for n in range(6)]
    rollout, critic = rlhf.PpoConfig(**PPO).rollout, rlhf.CriticConfig(max_rollouts=9, batch_size=4)
    calls: list[Callable[[], Any]] = [
        lambda: rlhf.train_sft(*llama, rows, config=rlhf.SftConfig(steps=9, batch_size=2)),
        lambda: rlhf.train_reward_model(*llama, pairs, config=rlhf.RewardConfig(steps=9)),
        lambda: rlhf.train_dpo(*llama, pairs, config=rlhf.DpoConfig(steps=9, batch_size=2)),
        lambda: rlhf.train_critic(*llama, QUESTIONS, by_length, rollout=rollout, config=critic),
    ]
    for call in calls:
        with pytest.raises(
            rlhf.TrainingPaused, match="attribute trained of this exception"
        ) as caught:
            call()
        assert caught.value.trained.history and isinstance(
            caught.value.trained.model, torch.nn.Module
        )


def test_a_pause_names_every_rule_that_fired_and_drift_last(llama: LanguageModel) -> None:
    rules = {name: change.model_copy(update={"after": 4}) for name, change in ALARMED.rules.items()}
    config = settings(health=rlhf.HealthConfig(rules=rules))
    with pytest.raises(
        rlhf.TrainingPaused, match=r"paused by 2 rules: .*kl_negative at .*kl_over_budget at "
    ):
        rlhf.train_ppo(*llama, QUESTIONS, by_length, config=config)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_a_constant_reward_ends_the_run_with_the_reason(value: float, llama: LanguageModel) -> None:
    def constant(prompts: Any, replies: list[str]) -> list[float]:
        return [value for _ in replies]

    enforced = settings(health=rlhf.HealthConfig(), iterations=20)
    with pytest.raises(
        rlhf.TrainingPaused, match="reward_constant at iteration 5: every reply so far got the same"
    ):
        rlhf.train_ppo(*llama, QUESTIONS, constant, config=enforced)
    rollout, critic = rlhf.PpoConfig(**PPO).rollout, rlhf.CriticConfig(max_rollouts=9, batch_size=4)
    with pytest.raises(rlhf.TrainingPaused, match="all 20 replies so far got the same reward"):
        rlhf.train_critic(*llama, QUESTIONS, constant, rollout=rollout, config=critic)

"""Learning rates: what the settings leave open suits the model, and what would wreck a pretrained
one is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length

import rlhf_core as rlhf
from rlhf_core.api.inputs import with_safe_rates
from rlhf_core.config.model import Strict
from rlhf_core.config.policy import CriticConfig, DpoConfig, PolicyStageConfig
from rlhf_core.config.rates import trained_parts, with_chosen_rates
from rlhf_core.errors import ConfigError
from rlhf_core.models.causal_lm import save_policy

ROWS = [{"prompt": f"the sky {n}", "completion": "is blue"} for n in range(6)]
PAIRS = [{"prompt": f"the sky {n}", "chosen": "is blue", "rejected": "red"} for n in range(6)]
HIGH = rlhf.OptimizerConfig(lr=3e-3, schedule="constant", warmup=0.0)
OPEN = PPO | CRITIC_FREE | {"iterations": 1, "warmup_iterations": 0}
del OPEN["policy_optimizer"]


@pytest.fixture(scope="module")
def pretrained(llama: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The same model as a user has it who loads it by its name."""
    folder = tmp_path_factory.mktemp("hub") / "llama"
    save_policy(folder, *llama)
    return AutoModelForCausalLM.from_pretrained(folder), llama[1]


def sft_rate(model: Any, tokenizer: Any, **more: Any) -> float:
    run = rlhf.train_sft(
        model, tokenizer, ROWS, config=rlhf.SftConfig(steps=1, max_tokens=64), **more
    )
    return max(record.get("lr", 0.0) for record in run.history)


def reward_rate(model: Any, tokenizer: Any, **more: Any) -> float:
    config = rlhf.RewardConfig(steps=1, max_tokens=64)
    run = rlhf.train_reward_model(model, tokenizer, PAIRS, config=config, **more)
    return max(record.get("lr", 0.0) for record in run.history)


def ppo_rate(model: Any, tokenizer: Any, **more: Any) -> float:
    run = rlhf.train_ppo(
        model, tokenizer, QUESTIONS, by_length, config=rlhf.PpoConfig(**OPEN), **more
    )
    return float(run.history[0]["policy_lr"])


@pytest.mark.parametrize(
    ("rate", "for_pretrained", "for_new"),
    [(sft_rate, 1e-5, 3e-3), (reward_rate, 1e-5, 7e-4), (ppo_rate, 1e-6, 5e-4)],
)
def test_a_config_with_any_field_keeps_a_rate_that_suits_the_model(
    rate: Callable[..., float],
    for_pretrained: float,
    for_new: float,
    llama: LanguageModel,
    pretrained: LanguageModel,
) -> None:
    assert rate(*pretrained) == pytest.approx(for_pretrained)
    assert rate(*llama) == pytest.approx(for_new)


def high_sft(model: Any, tokenizer: Any) -> None:
    rlhf.train_sft(model, tokenizer, ROWS, config=rlhf.SftConfig(steps=1, optimizer=HIGH))


def high_reward(model: Any, tokenizer: Any) -> None:
    rlhf.train_reward_model(
        model, tokenizer, PAIRS, config=rlhf.RewardConfig(steps=1, optimizer=HIGH)
    )


def high_critic(model: Any, tokenizer: Any) -> None:
    rlhf.train_critic(model, tokenizer, QUESTIONS, by_length, config=CriticConfig(optimizer=HIGH))


def high_ppo(model: Any, tokenizer: Any) -> None:
    config = rlhf.PpoConfig(**OPEN | {"policy_optimizer": HIGH})
    rlhf.train_ppo(model, tokenizer, QUESTIONS, by_length, config=config)


@pytest.mark.parametrize("call", [high_sft, high_reward, high_critic, high_ppo])
def test_a_rate_that_wrecks_a_pretrained_model_is_refused(
    call: Callable[[Any, Any], None], pretrained: LanguageModel
) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr 0\.003 .*allow_high_learning_rates"):
        call(*pretrained)


def test_who_insists_gets_the_rate(pretrained: LanguageModel) -> None:
    config = rlhf.SftConfig(steps=1, optimizer=HIGH, max_tokens=64)
    run = rlhf.train_sft(*pretrained, ROWS, config=config, allow_high_learning_rates=True)
    assert run.history[-1]["lr"] == HIGH.lr


@pytest.mark.parametrize(
    "config", [rlhf.SftConfig(), rlhf.RewardConfig(), CriticConfig(), rlhf.PpoConfig(), DpoConfig()]
)
def test_no_section_has_a_rate_of_its_own_that_a_pretrained_model_does_not_survive(
    config: Strict,
) -> None:
    assert not any(part.too_high for part in trained_parts(with_chosen_rates(config, new=False)))
    chosen = [part.optimizer.lr or 0 for part in trained_parts(with_chosen_rates(config, new=True))]
    assert chosen and min(chosen) >= 1e-4


@pytest.mark.parametrize(
    ("adapters", "critic_lora", "lr"),
    [(False, False, 5e-6), (True, False, 5e-5), (False, True, 5e-5)],
)
def test_a_critic_gets_the_rate_of_adapters_only_where_it_is_adapters(
    adapters: bool, critic_lora: bool, lr: float
) -> None:
    """With one copy of the weights a critic that was trained whole keeps weights of its own."""
    lora = rlhf.LoraConfig()
    config = rlhf.PpoConfig(
        policy_lora=lora, share_base=True, critic_lora=lora if critic_lora else None
    )
    chosen = with_chosen_rates(config, new=False, adapters=adapters)
    assert chosen.critic_optimizer is not None and chosen.critic_optimizer.lr == pytest.approx(lr)


def test_adapters_get_a_rate_of_their_own_and_a_stage_that_of_its_method(tmp_path: Path) -> None:
    adapted = with_safe_rates(rlhf.RewardConfig(lora=rlhf.LoraConfig()), tmp_path, insisted=False)
    assert adapted.optimizer.lr == 1e-4
    stage = with_chosen_rates(PolicyStageConfig(policy_lora=rlhf.LoraConfig()), new=False)
    assert stage.policy.dpo.optimizer.lr == 1e-5 and stage.policy_optimizer.lr == 1e-5
    assert with_chosen_rates(PolicyStageConfig(), new=False).policy.dpo.optimizer.lr == 1e-6
    own = rlhf.OptimizerConfig(lr=2e-5)
    assert with_chosen_rates(rlhf.SftConfig(optimizer=own), new=True).optimizer == own


@pytest.mark.parametrize(("iterations", "warmup"), [(1, 1), (3, 3), (20, 5)])
def test_the_warm_up_fits_a_short_run(iterations: int, warmup: int) -> None:
    assert rlhf.PpoConfig(iterations=iterations).warmup == warmup
    assert rlhf.PpoConfig(iterations=iterations, warmup_iterations=0).warmup == 0
    own = rlhf.PpoConfig(iterations=iterations, policy_optimizer=rlhf.OptimizerConfig(lr=1e-6))
    assert own.warmup == 0 and own.policy_optimizer.warmup > 0

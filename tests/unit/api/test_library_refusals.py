"""What the public functions refuse, each in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from unit.api.recipe import CRITIC_FREE, PPO, QUESTIONS, by_length

import rlhf_core as rlhf
from rlhf_core.errors import ConfigError, DataError, ModelError

Refused = tuple[Callable[[Any, Any, Any], Any], type[Exception], str]
SOURCES = {"reward": {"sources": [{"kind": "function", "target": "a.module:function"}]}}
REFUSED: dict[str, Refused] = {
    "no records": (lambda m, t, c: rlhf.train_sft(m, t, []), DataError, "demonstrations is empty"),
    "one record": (
        lambda m, t, c: rlhf.train_sft(m, t, [{"prompt": "a", "completion": "b"}]),
        DataError,
        "none can be held out",
    ),
    "an unknown format": (lambda m, t, c: rlhf.train_sft(m, t, [{"a": 1}] * 3), DataError, "no known format"),
    "a record that differs": (
        lambda m, t, c: rlhf.train_reward_model(
            m, t, [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}]
        ),
        DataError,
        "preferences, record 2",
    ),
    "no critic": (
        lambda m, t, c: rlhf.train_ppo(m, t, QUESTIONS, by_length, config=rlhf.PpoConfig(**PPO)),
        ConfigError,
        "advantage.estimator gae needs a critic",
    ),
    "a critic that nothing reads": (
        lambda m, t, c: rlhf.train_ppo(m, t, QUESTIONS, by_length, c, config=rlhf.PpoConfig(**PPO | CRITIC_FREE)),
        ConfigError,
        "needs no critic, but there is one",
    ),
    "a critic to pre-train that nothing reads": (
        lambda m, t, c: rlhf.train_critic(
            m, t, QUESTIONS, by_length, rollout=rlhf.PpoConfig(**PPO | CRITIC_FREE).rollout
        ),
        ConfigError,
        "call train_ppo without",
    ),
    "too few rewards": (
        lambda m, t, c: rlhf.train_ppo(m, t, QUESTIONS, lambda p, r: [1.0], c, config=rlhf.PpoConfig(**PPO)),
        DataError,
        "gave 1 scores for",
    ),
    "other units than the critic's": (
        lambda m, t, c: rlhf.train_ppo(
            m, t, QUESTIONS, by_length, c, config=rlhf.PpoConfig(**PPO | {"temperature": 0.5})
        ),
        ConfigError,
        "temperature",
    ),
    "ptx without texts": (
        lambda m, t, c: rlhf.train_ppo(
            m, t, QUESTIONS, by_length, c, config=rlhf.PpoConfig(**PPO | {"ptx": rlhf.PtxConfig()})
        ),
        ConfigError,
        "no demonstrations",
    ),
    "one string": (
        lambda m, t, c: rlhf.train_critic(m, t, "Name a colour", by_length),
        DataError,
        "prompts is one str",
    ),
    "a table of columns": (
        lambda m, t, c: rlhf.train_critic(m, t, {"prompt": QUESTIONS}, by_length),
        DataError,
        "prompts is one dict",
    ),
    "an empty prompt": (
        lambda m, t, c: rlhf.train_critic(m, t, ["a", " "], by_length),
        DataError,
        "prompts, record 2: the prompt is empty",
    ),
    "an empty reply": (
        lambda m, t, c: rlhf.train_sft(m, t, [{"prompt": "a", "completion": ""}] * 3),
        DataError,
        "record 1: the reply is empty",
    ),
    "a prompt that ends with a reply": (
        lambda m, t, c: rlhf.train_critic(m, t, [{"prompt": [{"role": "assistant", "content": "a"}]}], by_length),
        DataError,
        "record 1: the prompt must end with a turn of the user",
    ),
    "no function": (lambda m, t, c: rlhf.train_critic(m, t, QUESTIONS, 3), ConfigError, "reward is a int"),
    "another stage's settings": (
        lambda m, t, c: rlhf.train_sft(m, t, [{"prompt": "a", "completion": "b"}] * 3, config=rlhf.PpoConfig(**PPO)),
        ConfigError,
        "config is a PpoConfig; a SftConfig is needed",
    ),
    "a reward that is given twice": (
        lambda m, t, c: rlhf.train_critic(m, t, QUESTIONS, by_length, rollout=rlhf.PpoConfig(**PPO | SOURCES).rollout),
        ConfigError,
        "given twice",
    ),
    "a base that is not given": (
        lambda m, t, c: rlhf.train_ppo(
            m, t, QUESTIONS, by_length, c, config=rlhf.PpoConfig(**PPO | {"policy_init": "base"})
        ),
        ConfigError,
        "there is no base",
    ),
    "shared weights of models in memory": (
        lambda m, t, c: rlhf.train_ppo(
            m,
            t,
            QUESTIONS,
            by_length,
            c,
            config=rlhf.PpoConfig(**PPO | {"policy_lora": rlhf.LoraConfig(rank=2), "share_base": True}),
        ),
        ConfigError,
        "give model and referee as folders",
    ),
    "texts that nothing reads": (
        lambda m, t, c: rlhf.train_ppo(
            m,
            t,
            QUESTIONS,
            by_length,
            c,
            pretrain=["a text"],
            config=rlhf.PpoConfig(**PPO | {"ptx": rlhf.PtxConfig()}),
        ),
        ConfigError,
        "ptx.data is demonstrations",
    ),
    "prompts for no referee": (
        lambda m, t, c: rlhf.train_ppo(
            m, t, QUESTIONS, by_length, c, validation_prompts=QUESTIONS, config=rlhf.PpoConfig(**PPO)
        ),
        ConfigError,
        "judged by a referee",
    ),
    "a referee without prompts": (
        lambda m, t, c: rlhf.train_ppo(m, t, QUESTIONS, by_length, c, referee=c.model, config=rlhf.PpoConfig(**PPO)),
        DataError,
        "validation_prompts is empty",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(
    case: str, llama: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    call, error, message = REFUSED[case]
    model, tokenizer = llama
    critic = rlhf.train_critic(
        model, tokenizer, QUESTIONS, by_length, rollout=rlhf.PpoConfig(**PPO).rollout,
        config=rlhf.CriticConfig(max_rollouts=0),
    )  # fmt: skip
    with pytest.raises(error, match=message):
        call(model, tokenizer, critic)


def test_a_tokenizer_without_an_end_marker_is_refused(llama: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    tokenizer = copy.deepcopy(llama[1])
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        rlhf.train_sft(llama[0], tokenizer, [{"prompt": "a", "completion": "b"}] * 3)

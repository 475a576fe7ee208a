"""A folder of partial state is resumed by the run that left it there, and by no other of the same
names.
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length
from unit.training.tiny import SHAPE

import rlhf_core as rlhf
from rlhf_core.api.identity import claim_folder
from rlhf_core.config.reward_sources import FunctionSource
from rlhf_core.errors import RlhfError
from rlhf_core.models.causal_lm import new_model, save_policy

CONFIG = rlhf.PpoConfig(**PPO | CRITIC_FREE | {"iterations": 1})
ROWS = [{"prompt": f"the sky {n}", "completion": "is blue"} for n in range(6)]
PAIRS = [{"prompt": f"the sky {n}", "chosen": "is blue", "rejected": "red"} for n in range(6)]
SIGN = 1.0
KNOWN = ("red", "blue")


def helper(reply: str) -> float:
    return float(len(reply))


def closure(sign: float) -> Callable[..., list[float]]:
    return lambda prompts, replies: [sign * len(reply) for reply in replies]


def nested(sign: float) -> Callable[..., list[float]]:
    inner = closure(sign)
    return lambda prompts, replies: inner(prompts, replies)


def default(sign: float) -> Callable[..., list[float]]:
    def reward(prompts: Any, replies: Any, sign: float = sign) -> list[float]:
        return [sign * len(reply) for reply in replies]

    return reward


def keyword_default(sign: float) -> Callable[..., list[float]]:
    def reward(prompts: Any, replies: Any, *, weights: Any = (sign, {"a": [sign]})) -> list[float]:
        return [weights[0] * len(reply) for reply in replies]

    return reward


def of_globals(sign: float) -> Callable[..., list[float]]:
    names = {"SIGN": sign, "KNOWN": {"red", "blue", "green"}}
    exec(
        "def reward(prompts, replies): return [SIGN * len(r) * (r in KNOWN) for r in replies]",
        names,
    )
    return names["reward"]  # type: ignore[return-value]


def partial(sign: float) -> Callable[..., list[float]]:
    return functools.partial(lambda sign, prompts, replies: [sign for _ in replies], sign)


class Scorer:
    """A reward that is an object."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def __call__(self, prompts: Any, replies: Any) -> list[float]:
        return [self.sign * len(reply) for reply in replies]

    def score(self, prompts: Any, replies: Any) -> list[float]:
        return self(prompts, replies)


def of_tensor(sign: float) -> Callable[..., list[float]]:
    weights = torch.tensor([sign])
    return lambda prompts, replies: [float(weights) for _ in replies]


MAKERS: dict[str, Callable[[float], Any]] = {
    "a variable around it": closure,
    "one around a function that it calls": nested,
    "a default": default,
    "a keyword's default": keyword_default,
    "a global": of_globals,
    "an argument bound before": partial,
    "an attribute": Scorer,
    "an attribute of its object": lambda sign: Scorer(sign).score,
    "a tensor": of_tensor,
}


def claim(work: Path, reward: Any, **more: Any) -> None:
    claim_folder(rlhf.RunContext(work), "train_ppo", {"reward": reward} | more)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_reward_function_is_known_by_the_values_that_it_reads(kind: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    claim(tmp_path, make(1.0))
    claim(tmp_path, make(1.0))
    with pytest.raises(RlhfError, match=r"with other settings, data or models, namely reward \("):
        claim(tmp_path, make(-1.0))


def test_a_reward_function_is_known_by_its_code_and_that_of_what_it_calls(tmp_path: Path) -> None:
    def source(body: str) -> Any:
        names: dict[str, Any] = {}
        exec(
            f"def helper(r):\n    return {body}\ndef reward(p, replies):\n    return [helper(r) for r in replies]",
            names,
        )
        return names["reward"]

    claim(tmp_path, source("len(r)"))
    claim(tmp_path, source("len(r)  # the length"))
    with pytest.raises(RlhfError, match=r"reward \(helper\)"):
        claim(tmp_path, source("-len(r)"))


def test_what_cannot_be_compared_is_not_resumed_unless_it_has_a_key(tmp_path: Path) -> None:
    def holding(lock: Any) -> Any:
        return lambda prompts, replies: [1.0 if lock else 0.0 for _ in replies]

    claim(tmp_path / "run", holding(threading.Lock()))
    with pytest.raises(RlhfError, match=r"may have had another reward \(lock\).*resume_key"):
        claim(tmp_path / "run", holding(threading.Lock()))
    for key in (1, 1, 2):
        reward = holding(threading.Lock())
        reward.resume_key = key
        if key == 2:
            with pytest.raises(RlhfError, match="resume_key"):
                claim(tmp_path / "keyed", reward)
        else:
            claim(tmp_path / "keyed", reward)


def test_a_value_that_holds_itself_has_a_hash(tmp_path: Path) -> None:
    around: list[Any] = []
    around.append(around)
    for _ in range(2):
        claim(
            tmp_path,
            lambda prompts, replies: around,
            namespace=SimpleNamespace(a=1),
            paths=tmp_path / "nowhere",
        )


def other_weights(folder: Path, tokenizer: Any) -> None:
    """Put a model of the same names and sizes there."""
    shutil.rmtree(folder)
    save_policy(folder, new_model(SHAPE, tokenizer, seed=2), tokenizer)


def sft(model: Path, tokenizer: Any, context: rlhf.RunContext) -> Any:
    return rlhf.train_sft(model, tokenizer, ROWS, config=rlhf.SftConfig(steps=1), context=context)


def reward_model(model: Path, tokenizer: Any, context: rlhf.RunContext) -> Any:
    return rlhf.train_reward_model(
        model, tokenizer, PAIRS, config=rlhf.RewardConfig(steps=1), context=context
    )


def critic(model: Path, tokenizer: Any, context: rlhf.RunContext) -> Any:
    rollout, config = rlhf.PpoConfig(**PPO).rollout, rlhf.CriticConfig(max_rollouts=1, batch_size=4)
    return rlhf.train_critic(
        model, tokenizer, QUESTIONS, by_length, rollout=rollout, config=config, context=context
    )


def ppo(model: Path, tokenizer: Any, context: rlhf.RunContext) -> Any:
    return rlhf.train_ppo(
        model,
        tokenizer,
        QUESTIONS,
        by_length,
        config=CONFIG,
        context=context,
        allow_high_learning_rates=True,
    )


@pytest.mark.parametrize("train", [sft, reward_model, critic, ppo])
def test_other_weights_in_a_folder_of_the_same_name_are_another_run(
    train: Callable[..., Any], llama: LanguageModel, tmp_path: Path
) -> None:
    tokenizer, context = llama[1], rlhf.RunContext(tmp_path / "run")
    save_policy(tmp_path / "m", *llama)
    train(tmp_path / "m", tokenizer, context)
    train(tmp_path / "m", tokenizer, context)
    other_weights(tmp_path / "m", tokenizer)
    with pytest.raises(RlhfError, match=r"namely (model|policy)"):
        train(tmp_path / "m", tokenizer, context)


def test_a_function_that_the_settings_name_is_known_by_its_code(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_checks_of_identity.py"
    source = FunctionSource(target="own_checks_of_identity:score")
    config = rlhf.PpoConfig(
        **PPO | CRITIC_FREE | {"iterations": 1, "reward": {"sources": [source]}}
    )
    context = rlhf.RunContext(tmp_path / "run", folder=tmp_path)
    for sign in ("", "-"):
        module.write_text(
            f"def score(prompts, replies):\n    return [{sign}len(reply) for reply in replies]\n"
        )
        monkeypatch.delitem(__import__("sys").modules, module.stem, raising=False)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        if sign:
            with pytest.raises(RlhfError, match=r"namely source function \(code\)"):
                rlhf.train_ppo(*llama, QUESTIONS, config=config, context=context)
        else:
            rlhf.train_ppo(*llama, QUESTIONS, config=config, context=context)

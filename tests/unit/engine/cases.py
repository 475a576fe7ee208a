"""The four trainings on tiny models, as functions of an engine alone: what must not depend on ranks
or sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from unit.ppo.tiny import EOS, PAD, Tiny, collect, make_config, make_tiny

from rlhf_core.config.base import SftConfig
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data import batches as padding
from rlhf_core.data.batches import TokenisedPair
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import ValueObjective
from rlhf_core.ppo.update import Learner, PtxData, update
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.engine.base import Engine, LocalEngine
from rlhf_core.training.examples import Example
from rlhf_core.training.passes import totals_of_steps
from rlhf_core.training.reward.trainer import RewardTask
from rlhf_core.training.sft import SftTask

CASES = (
    "sft",
    "reward",
    "reward_in_micro_batches",
    "critic",
    "ppo",
)
MakeEngine = Callable[[nn.Module, OptimizerConfig, str], Engine]

# A learning rate so high that the weights after one step are the gradient, and one that moves
# weights well beyond their rounding without growing it.
KINDS = {"gradient": (1e4, 1), "updates": (0.05, 4)}
CUT: dict[str, Any] = {
    "token_budget": 300,
    "max_padding": 0.01,
}  # batches that are cut into micro-batches
FEW_LOGITS = (
    4 * 23 * 5
)  # bytes of five positions: every pass is made in several chunks, unequal over ranks


def sgd(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Plain gradient descent: unlike Adam it does not turn a rounding error of a tiny gradient into
    a full step.
    """
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config.lr)


def local(model: nn.Module, config: OptimizerConfig, name: str) -> Engine:
    return LocalEngine(model, config, 1000, name, build=sgd)


def optimizer(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, schedule="constant", warmup=0.0, max_grad_norm=None)


def tokens(seed: int, count: int) -> list[int]:
    return [4 + (seed * 5 + i * (1 + seed % 3)) % 19 for i in range(count)]


def examples(count: int) -> list[Example]:
    return [Example(tokens(i, 1 + i % 5), [*tokens(i + 7, i % 6), EOS]) for i in range(count)]


def pairs(count: int) -> list[TokenisedPair]:
    return [
        TokenisedPair(
            i,
            tokens(i, 1 + i % 4),
            [*tokens(i + 3, 1 + i % 5), EOS],
            [*tokens(i + 8, 1 + i % 3), EOS],
        )
        for i in range(count)
    ]


def ppo_config(lr: float, minibatches: int = 2) -> PpoConfig:
    """For seven rows: no share is even. The ptx batch has one row, which leaves ranks without
    any.
    """
    rates = {"lr": lr, "schedule": "constant", "warmup": 0.0, "max_grad_norm": None}
    return make_config(
        iterations=20, batch_size=8, minibatches=minibatches, micro_batch_size=2, warmup_iterations=0,
        advantage={"normalize": True}, entropy={"kind": "bonus", "weight": 0.01},
        kl={"placement": "loss", "estimator": "k3"}, ptx={"weight": 0.3, "batch_size": 1},
        policy_optimizer=rates, critic_optimizer=rates,
    )  # fmt: skip


def rollout(tiny: Tiny, rows: range = range(7), pair: ActorCriticPair | None = None) -> Experience:
    """One experience of seven prompts, sampled and scored by all ranks together."""
    pair = pair or ActorCriticPair(
        tiny.policy, tiny.critic, {}, tiny.sampling, MicroBatchLimits(2), FEW_LOGITS
    )
    return collect(
        tiny,
        ppo_config(0.1),
        rows,
        streams=[100 + row for row in rows],
        seed=5,
        kl_coef=0.1,
        pair=pair,
    )


def save_experience(path: Path, experience: Experience) -> None:
    save_file(
        {f.name: getattr(experience, f.name).clone().contiguous() for f in fields(Experience)}, path
    )


def load_experience(path: Path) -> Experience:
    return Experience(**load_file(path))


def train(
    case: str, make: MakeEngine, lr: float, steps: int, stored: Path
) -> tuple[list[Engine], dict[str, float]]:
    """``steps`` optimiser steps of a case; its engines, and the figures of the last step."""
    tiny = make_tiny()
    runners: dict[str, Callable[..., Any]] = {
        "sft": _sft, "reward": _reward, "critic": _critic, "ppo": _ppo,
        "reward_in_micro_batches": partial(_reward, **CUT),
    }  # fmt: skip
    engines, figures = runners[case](tiny, make, lr, steps, stored)
    return engines, figures


def changes(engines: list[Engine], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """By how much each weight has moved (on the first rank)."""
    after = {
        f"{e.name}.{name}": weight for e in engines for name, weight in e.trained_weights().items()
    }
    return {name: weight - before[name] for name, weight in after.items()}


def start(case: str) -> dict[str, Tensor]:
    """The weights that every case begins with."""
    tiny = make_tiny()
    models = {"sft": {"policy": tiny.policy}, "reward": {"reward": with_unembedding(tiny)}}.get(
        case.partition("_")[0],
        {"critic": tiny.critic}
        if case == "critic"
        else {"policy": tiny.policy, "critic": tiny.critic},
    )
    return {
        f"{k}.{n}": p.detach().clone()
        for k, model in models.items()
        for n, p in model.named_parameters()
    }


def another_policy() -> nn.Module:
    """A policy of the same shape with other weights."""
    policy = make_tiny().policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5)
    return policy


def with_unembedding(tiny: Tiny) -> ScalarModel:
    """A reward model that keeps the language model's own unembedding for the imitation term."""
    return ScalarModel(tiny.reward.model, tiny.policy.lm_head.weight.detach())


def _steps(engine: Engine, task: Any, steps: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in range(steps):
        engine.model.train()
        report = task.train_step(step)
        metrics = report.metrics | {"tokens": report.tokens, "grad_norm": engine.step().grad_norm}
    return metrics | task.evaluate(engine.reader() or engine.model)


def _sft(
    tiny: Tiny, make: MakeEngine, lr: float, steps: int, stored: Path
) -> tuple[list[Engine], dict[str, float]]:
    config = SftConfig(batch_size=7, micro_batch_size=2, optimizer=optimizer(lr))
    engine = make(tiny.policy, config.optimizer, "policy")
    task = SftTask(
        engine, tiny.policy, examples(30), examples(9), config, config.seed, PAD, FEW_LOGITS
    )
    return [engine], _steps(engine, task, steps)


def _reward(
    tiny: Tiny, make: MakeEngine, lr: float, steps: int, stored: Path, **batch: Any
) -> tuple[list[Engine], dict[str, float]]:
    """With ``batch``, batches that every rank cuts into several micro-batches of its own rows."""
    model, smallest = with_unembedding(tiny), 1 if batch else padding.SMALLEST_MICRO_BATCH
    pair_batch = PairBatchConfig.model_validate({"token_budget": 90, "min_pairs": 1} | batch)
    config = RewardConfig(batch=pair_batch, centering=0.1, optimizer=optimizer(lr))
    engine = make(model, config.optimizer, "reward")
    margins = None if batch else [0.1 * i for i in range(23)]
    task = RewardTask(engine, model, pairs(23), pairs(9), config, PAD, "reward", margins)
    with mock.patch.object(padding, "SMALLEST_MICRO_BATCH", smallest):
        return [engine], _steps(engine, task, steps)


def _critic(
    tiny: Tiny, make: MakeEngine, lr: float, steps: int, stored: Path
) -> tuple[list[Engine], dict[str, float]]:
    experience, engine = load_experience(stored), make(tiny.critic, optimizer(lr), "critic")
    pair = ActorCriticPair(
        tiny.policy, tiny.critic, {"critic": engine}, tiny.sampling, MicroBatchLimits(2)
    )
    figures: dict[str, float] = {}
    for step in range(steps):
        (minibatch, *_) = experience.minibatches(2, 3, step)
        figures = totals_of_steps(
            [pair.accumulate_value_gradients(minibatch, ValueObjective(0.2))]
        )[0]
        figures["grad_norm"] = engine.step().grad_norm
    return [engine], figures


def _ppo(
    tiny: Tiny, make: MakeEngine, lr: float, steps: int, stored: Path
) -> tuple[list[Engine], dict[str, float]]:
    config, experience = ppo_config(lr, min(steps, 2)), load_experience(stored)
    engines = {
        "policy": make(tiny.policy, config.policy_optimizer, "policy"),
        "critic": make(tiny.critic, config.critic_optimizer, "critic"),
    }
    limits = MicroBatchLimits(config.micro_batch_size)
    pair = ActorCriticPair(tiny.policy, tiny.critic, engines, tiny.sampling, limits, FEW_LOGITS)
    ptx = PtxData([(p, [*reversed(p), EOS]) for p in tiny.prompts], config.ptx.batch_size, 5, PAD)
    learner = Learner(config, pair, tiny.reference, ptx)
    figures: dict[str, float] = {}
    for iteration in range((steps + 1) // 2):
        figures = update(learner, experience, 0.1, iteration).metrics
    return list(engines.values()), figures


def write_result(
    folder: Path, key: str, tensors: dict[str, Tensor], figures: dict[str, float]
) -> None:
    """What the first rank found, as ``KEY.safetensors``. Padding depends on the number of ranks and
    is left out.
    """
    figures = {
        name: value for name, value in figures.items() if not name.startswith("padding_share")
    }
    if distributed.is_rank_zero():
        values = {
            f"figure.{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in figures.items()
        }
        save_file(
            {n: t.contiguous() for n, t in tensors.items()} | values, folder / f"{key}.safetensors"
        )


def read_result(folder: Path, key: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors and figures that :func:`write_result` left."""
    found = load_file(folder / f"{key}.safetensors")
    figures = {
        name.removeprefix("figure."): float(t)
        for name, t in found.items()
        if name.startswith("figure.")
    }
    return {name: t for name, t in found.items() if not name.startswith("figure.")}, figures


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative L2 distance of two sets of tensors under the same names."""
    assert a.keys() == b.keys() and a
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (difference / sum(float(a[name].double().square().sum()) for name in a)) ** 0.5

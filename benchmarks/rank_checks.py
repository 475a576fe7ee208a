"""``torchrun -m benchmarks.rank_checks``: a step of PPO on all ranks, against that of one rank.

The first rank makes the step of policy and critic before it joins the others, and keeps the
rollout. Then all make the same step together with each engine, and compare by how much the weights
moved.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.harness import distance
from benchmarks.random_models import Subject, bare_trainer, new_policy, new_scalar, sampling_of
from rlhf_core.config.loading import check_params
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.models.precision import allow_tf32
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import estimate_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.reward_sources.source import reward_model_fn
from rlhf_core.ppo.trainer import PhaseClock
from rlhf_core.ppo.update import Learner, PtxData, update
from rlhf_core.runtime import distributed
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.storage.files import atomic_write_json
from rlhf_core.training.engine.base import Engine, LocalEngine
from rlhf_core.training.run_context import RunContext
from rlhf_extras.memory.architecture import architecture_of_file

ENGINES = ("local", "ZeRO 1", "ZeRO 2", "ZeRO 3")
KL_COEF = 0.1
# Plain gradient descent at a rate so high that the weights are the gradient afterwards: Adam's first
# step would be the same for gradients that all lack one factor.
RATES: dict[str, Any] = {
    "lr": 1e4,
    "schedule": "constant",
    "warmup": 0.0,
    "max_grad_norm": None,
    "weight_decay": 0.0,
}


def main() -> int:
    """Make the steps, write how far they are apart, and exit 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_checks", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the findings go")
    parser.add_argument("--config", type=Path, help="the config.json of the model that is trained")
    parser.add_argument("--rows", type=int, help="rows of the step")
    parser.add_argument("--tokens", type=int, help="tokens of each prompt, and of each reply")
    given = parser.parse_args()
    allow_tf32(False)
    subject = _subject(given.config, given.rows, given.tokens)
    if os.environ["RANK"] == "0":
        make_reference(subject, given.folder)
    with distributed.process_group():
        found = compared_steps(subject, given.folder)
        if distributed.is_rank_zero():
            atomic_write_json(given.folder / "step.json", found)
    return 0


def _subject(config: Path, rows: int, tokens: int) -> Subject:
    settings = {
        "iterations": 10,
        "batch_size": rows,
        "minibatches": 1,
        "epochs": 1,
        "micro_batch_size": 2,
        "micro_batch_tokens": None,
        "max_new_tokens": tokens,
        "warmup_iterations": 0,
        "ptx": {"weight": 0.3, "batch_size": max(rows // 2, 1)},
        "policy_optimizer": RATES,
        "critic_optimizer": RATES,
    }
    params = check_params({"seed": 1, "base": {"dtype": "float32"}, "ppo": settings})
    return Subject("step", architecture_of_file(config), params, tokens, tokens)


def make_reference(subject: Subject, folder: Path) -> None:
    """Make a rollout and one step on it alone, and save both to ``folder``."""
    pair = _pair(subject, "local")
    learner = _learner(subject, pair)
    config, count = subject.params.ppo, subject.params.ppo.batch_size
    prompts = [subject.ragged(row, subject.prompt) for row in range(count)]
    reward = reward_model_fn(new_scalar(subject).requires_grad_(False), MicroBatchLimits(2))
    trainer = bare_trainer(learner, reward, prompts, RunContext(folder / "work"))
    experience = trainer.collect(
        pair, learner.reference, config, range(count), KL_COEF, PhaseClock()
    )
    experience = estimate_advantages(experience, config.advantage, 1)
    columns = {}
    for column in fields(Experience):
        columns[column.name] = getattr(experience, column.name).cpu().clone().contiguous()
    save_file(columns, folder / "experience.safetensors")
    save_file(_step(learner, experience), folder / "reference.safetensors")


def compared_steps(subject: Subject, folder: Path) -> dict[str, Any]:
    """Make the step of the reference with every engine.

    Returns, by engine, how far the changes of policy and critic are from the reference's, by the
    size of these.
    """
    loaded = load_file(folder / "experience.safetensors", device=str(distributed.device()))
    found: dict[str, Any] = {}
    for engine in ENGINES:
        learner = _learner(subject, _pair(subject, engine))
        changes = _step(learner, Experience(**loaded))
        if distributed.is_rank_zero():
            reference = load_file(folder / "reference.safetensors")
            found[engine] = {
                name: distance(_of_model(changes, name), _of_model(reference, name))
                for name in ("policy", "critic")
            }
        for trained in learner.pair.engines.values():
            trained.release()  # which compares the gathered weights with the sharded ones
        del learner
        gc.collect()
    return found


def _of_model(changes: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    return {name: change for name, change in changes.items() if name.startswith(f"{model}.")}


def _pair(subject: Subject, engine: str) -> ActorCriticPair:
    config = subject.params.ppo
    policy, critic = new_policy(subject), new_scalar(subject)
    assert config.critic_optimizer is not None
    engines = {
        "policy": _engine(policy, config.policy_optimizer, "policy", engine),
        "critic": _engine(critic, config.critic_optimizer, "critic", engine),
    }
    return ActorCriticPair(policy, critic, engines, sampling_of(subject), MicroBatchLimits(2))


def _engine(model: nn.Module, config: OptimizerConfig, name: str, engine: str) -> Engine:
    if engine == "local":
        return LocalEngine(model, config, 1000, name, build=_descent)
    from rlhf_core.training.engine.deepspeed import DeepSpeedEngine

    zero = {"ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3}[engine]
    launch = LaunchConfig(engine="deepspeed", zero=zero)  # type: ignore[arg-type]
    return DeepSpeedEngine(model, config, 1000, name, None, launch, Path(), build=_descent)


def _descent(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=config.lr or 0.0)


def _learner(subject: Subject, pair: ActorCriticPair) -> Learner:
    config = subject.params.ppo
    reference = new_policy(subject).requires_grad_(False)
    rows = [
        (subject.ids(row, subject.prompt), subject.ragged(row, subject.reply)) for row in range(16)
    ]
    ptx = PtxData(rows, config.ptx.batch_size, 0, sampling_of(subject).pad_id)
    return Learner(config, pair, reference, ptx)


def _step(learner: Learner, experience: Experience) -> dict[str, Tensor]:
    """By how much one update moves each weight, on the first rank."""
    engines = learner.pair.engines
    before = {name: engine.trained_weights() for name, engine in engines.items()}
    update(learner, experience.learnable(), KL_COEF, 0)
    changes = {}
    for model, engine in engines.items():
        for name, weight in engine.trained_weights().items():
            changes[f"{model}.{name}"] = (weight - before[model][name]).contiguous()
    return changes


if __name__ == "__main__":
    sys.exit(main())

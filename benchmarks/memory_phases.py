"""Peaks of memory, phase by phase, of the trainers themselves: what ``rlhf plan`` estimates, measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core import distributed
from rlhf_core.config.launch import LaunchConfig
from rlhf_core.config.loading.load import Params
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.evaluation.drift import measure_drift
from rlhf_core.evaluation.generation import OnPolicyReplies
from rlhf_core.memory.dry_run import llama_config
from rlhf_core.memory.lengths import Lengths, Longest
from rlhf_core.memory.setting import Recipe
from rlhf_core.memory.shapes import Shape
from rlhf_core.memory.tensor_memory import TensorMemory
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.lora import WithoutAdapters, add_adapters
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.ptx import PtxData, accumulate_ptx_gradient
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import Actors, assemble, model_scorer, sample_together, score_tokens
from rlhf_core.ppo.update import Learner, accumulate_policy_gradient
from rlhf_core.ppo.value_loss import ValueSettings, accumulate_value_gradient
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.token_scoring import Tokens
from rlhf_core.training.engine import Engine, joint_step
from rlhf_core.training.engine.factory import build_engine
from rlhf_core.training.examples import Example
from rlhf_core.training.reward.trainer import RewardTask
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask

EOS, PAD = 3, 0


class Meter(Protocol):
    """Measures blocks and keeps the highest peak of each name."""

    peaks: dict[str, int]

    def phase(self, name: str) -> Any:
        """A context whose peak is kept under ``name``."""


class CudaMemory:
    """What the CUDA allocator reports, with the interface of ``TensorMemory``."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peaks[name] = max(torch.cuda.max_memory_allocated(), self.peaks.get(name, 0))


@dataclass(frozen=True)
class Subject:
    """A shape with settings, and sequences of the longest kind: ``prompt`` and ``reply`` tokens of every row."""

    name: str
    shape: Shape
    params: Params
    prompt: int
    reply: int

    @property
    def recipe(self) -> Recipe:
        """What the plan is told: exactly what is run."""
        total = self.prompt + self.reply
        same = Longest(((total, self.reply),))
        lengths = Lengths(self.prompt, same, same, same, "the rows that are run")
        return Recipe(self.params, self.shape, lengths, Path())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = getattr(torch, self.params.base.dtype)
        return dtype

    def ids(self, row: int, length: int) -> list[int]:
        """Token ids that are neither padding nor the end marker."""
        return [4 + (7 * row + 3 * i) % (self.shape.vocabulary - 4) for i in range(length)]

    def ragged(self, row: int, length: int) -> list[int]:
        """The same, one row in four a token shorter, so that batches are padded as real ones are."""
        return self.ids(row, length - (row % 4 == 1))


def new_policy(subject: Subject) -> PreTrainedModel:
    """Random weights in the planned precision, on the GPU where there is one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(llama_config(subject.shape), dtype=subject.dtype)
    placed: PreTrainedModel = model.to(distributed.device()).eval()
    return placed


def new_scalar(subject: Subject, unembedding: bool = False) -> ScalarModel:
    """A scalar model, with the unembedding that a reward model in training keeps where it is not tied."""
    shape = subject.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForSequenceClassification.from_config(llama_config(shape), dtype=subject.dtype)
        table = torch.randn(shape.vocabulary, shape.hidden, dtype=subject.dtype) if unembedding else None
    return ScalarModel(model, table).to(distributed.device()).eval()


def measure(subject: Subject, stages: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Peak bytes by stage and phase, each stage with models of its own."""
    found = {}
    for stage in stages:
        meter: Any = CudaMemory() if torch.cuda.is_available() else TensorMemory()
        launch = {str(name): one for name, one in subject.params.compute.launch.items()}.get(stage, LaunchConfig())
        with nullcontext() if torch.cuda.is_available() else meter:
            RUNS[stage](subject, meter, RunContext(Path("work"), launch=launch))
        found[stage] = meter.peaks
    return found


def warmed(model: torch.nn.Module, config: OptimizerConfig, name: str, context: RunContext) -> Engine:
    """The engine that the stage would build, after a step of zero gradients: its optimiser's moments exist."""
    engine = build_engine(model, config, 10, name, context)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    engine.step()
    return engine


def _measure(task: SftTask | RewardTask, engine: Engine, meter: Meter) -> None:
    """A step of supervised training and an evaluation."""
    with meter.phase("update"):
        task.train_step(0)
    with meter.phase("step"):
        engine.step()
    with meter.phase("evaluation"):
        task.evaluate()


def run_sft(subject: Subject, meter: Meter, context: RunContext) -> None:
    """The heaviest step; a full held-out batch."""
    config = subject.params.sft
    model = new_policy(subject)
    engine = warmed(model, config.optimizer, "sft", context)
    rows = [Example(subject.ids(i, subject.prompt), subject.ragged(i, subject.reply)) for i in range(64)]
    task = SftTask(engine, model, rows[: config.batch_size], rows, config, PAD)
    _measure(task, engine, meter)


def run_reward(subject: Subject, meter: Meter, context: RunContext) -> None:
    """The heaviest batch of pairs; a full held-out batch."""
    config = subject.params.reward
    model = new_scalar(subject, unembedding=not subject.shape.tied)
    engine = warmed(model, config.optimizer, "reward", context)
    pairs = [
        TokenisedPair(
            i,
            subject.ids(i, subject.prompt),
            subject.ids(i + 1, subject.reply),
            subject.ragged(i + 2, subject.reply),
        )
        for i in range(128)
    ]
    limits = config.batch
    _, count = subject.recipe.lengths.pairs.pairs(limits.token_budget, limits.min_pairs, limits.max_pairs)
    task = RewardTask(engine, model, pairs[:count], pairs, config, PAD, "reward")
    _measure(task, engine, meter)


def run_critic(subject: Subject, meter: Meter, context: RunContext) -> None:
    """A rollout of the frozen policy and the critic's steps on it."""
    config, units = subject.params.critic, subject.params.ppo.units
    policy, critic, reward = new_policy(subject), new_scalar(subject), new_scalar(subject)
    policy.requires_grad_(False)
    reward.requires_grad_(False)
    engine = warmed(critic, config.optimizer, "critic", context)
    actors = Actors(policy, policy, critic, model_scorer(reward, units.micro_batch_size))
    experience = _experience(subject, actors, config.batch_size, meter)
    settings = ValueSettings(0.2, micro_batch_size=units.micro_batch_size)
    for minibatch in experience.minibatches(config.minibatches, 0, 0):
        with meter.phase("update critic"):
            accumulate_value_gradient(engine, critic, minibatch, settings)
        with meter.phase("step"):
            engine.step()


def run_ppo(subject: Subject, meter: Meter, context: RunContext) -> None:
    """One iteration, with the models that stages/ppo.py keeps."""
    config = subject.params.ppo
    policy, critic = new_policy(subject), new_scalar(subject)
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, 0)
    reference = _reference(policy, config)
    reward, referee = (new_scalar(subject).requires_grad_(False) for _ in range(2))
    learner = Learner(
        config=config,
        sampling=_sampling(subject),
        policy=policy,
        policy_engine=warmed(policy, config.policy_optimizer, "policy", context),
        critic=critic,
        critic_engine=warmed(critic, config.critic_optimizer or config.policy_optimizer, "critic", context),
        reference=reference,
        ptx=_ptx(subject),
    )
    actors = Actors(policy, reference, critic, model_scorer(reward, config.micro_batch_size))
    experience = _experience(subject, actors, config.batch_size, meter)
    with meter.phase("rewards"):
        model_scorer(referee, config.micro_batch_size)(experience.batch)
    for minibatch in experience.minibatches(config.minibatches, 0, 0):
        _update(learner, minibatch, meter)
    with meter.phase("selection"):
        _select(subject, policy, reference, (reward, referee))


def _reference(policy: PreTrainedModel, config: PpoConfig) -> Any:
    """A frozen copy, or the policy itself without its adapters."""
    if config.policy_lora is None:
        return copy.deepcopy(policy).requires_grad_(False)
    add_adapters(policy, config.policy_lora, 0)
    return WithoutAdapters(policy)


def _update(learner: Learner, minibatch: Experience, meter: Meter) -> None:
    config = learner.config
    with meter.phase("update policy"):
        accumulate_policy_gradient(learner, minibatch, config.kl.coefficient, 1.0)
    if learner.ptx is not None:
        with meter.phase("update ptx"):
            accumulate_ptx_gradient(
                learner.policy_engine, learner.policy, learner.ptx, 0, config.ptx.weight, config.micro_batch_size
            )
    with meter.phase("update critic"):
        accumulate_value_gradient(learner.critic_engine, learner.critic, minibatch, learner.value_settings)
    with meter.phase("step"):
        joint_step((learner.policy_engine, learner.critic_engine), 1.0)


def _sampling(subject: Subject) -> Sampling:
    """No token is the end marker: the longest rollout that the settings allow."""
    config = subject.params.ppo
    return Sampling(-1, PAD, config.max_new_tokens, config.temperature)


def _ptx(subject: Subject) -> PtxData | None:
    if subject.params.ppo.ptx.weight == 0:
        return None
    rows = [(subject.ids(i, subject.prompt), subject.ragged(i, subject.reply)) for i in range(32)]
    return PtxData(rows, subject.params.ppo.ptx.batch_size, 0, PAD)


def _rollout(subject: Subject, policy: PreTrainedModel, rows: int, at_once: int | None = None) -> Rollout:
    prompts = [subject.ragged(i, subject.prompt) for i in range(rows)]
    return sample_together(policy, prompts, range(rows), 0, _sampling(subject), at_once)


def _experience(subject: Subject, actors: Actors, rows: int, meter: Meter) -> Experience:
    """What ``ppo.rollout.collect`` does, phase by phase."""
    units = subject.params.ppo.units
    with meter.phase("generation"):
        rollout = _rollout(subject, actors.policy, rows, units.sampling_batch_size)
    with meter.phase("scoring"):
        scored = score_tokens(actors, rollout, _sampling(subject), units.micro_batch_size)
    with meter.phase("rewards"):
        plain = Rollout(*(value.clone() for value in vars(rollout).values()))
        scores = actors.score(_tokens(plain))
    return assemble(plain, scored, scores, units, RunningMeanStd(), units.kl.coefficient)


def _tokens(rollout: Rollout) -> Tokens:
    return Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)


def _select(
    subject: Subject, policy: PreTrainedModel, reference: PreTrainedModel, judges: Sequence[ScalarModel]
) -> None:
    """What evaluation.selection does with a batch of validation prompts."""
    selection = subject.params.ppo.selection
    rows = min(selection.prompts, selection.batch_size)
    rollout = _rollout(subject, policy, rows)
    measure_drift(OnPolicyReplies([], [rollout], [1.0], _sampling(subject)), reference)
    for judge in judges:
        model_scorer(judge, rows)(_tokens(rollout))


RUNS = {"sft": run_sft, "reward": run_reward, "critic": run_critic, "ppo": run_ppo}

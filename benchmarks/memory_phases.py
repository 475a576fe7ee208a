"""Peaks of memory, phase by phase, of the trainers themselves: what ``rlhf plan`` estimates, measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_core.config.load import Params
from rlhf_core.data.pairs import TokenisedPair
from rlhf_core.evaluation.replies import Sampled, measure_drift
from rlhf_core.models.heads import ScalarModel
from rlhf_core.plan.lengths import Lengths, Longest
from rlhf_core.plan.placement import placement_of
from rlhf_core.plan.setting import Setting
from rlhf_core.plan.shapes import Shape
from rlhf_core.plan.tensor_memory import TensorMemory
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.generation import Rollout, generate
from rlhf_core.ppo.ptx import PtxData, accumulate_ptx_gradient
from rlhf_core.ppo.rewards import RunningMoments
from rlhf_core.ppo.rollout import Actors, assemble, model_scorer, score_tokens
from rlhf_core.ppo.sampling import Sampling, philox_uniforms
from rlhf_core.ppo.update import Learner, accumulate_policy_gradient
from rlhf_core.ppo.value import ValueSettings, accumulate_value_gradient
from rlhf_core.training.engine import LocalEngine, joint_step
from rlhf_core.training.examples import Example
from rlhf_core.training.reward import RewardTask
from rlhf_core.training.sft import SftTask

EOS, PAD = 3, 0
SELECTION_ROWS = 64


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
    def setting(self) -> Setting:
        """What the plan is told: exactly what is run."""
        total = self.prompt + self.reply
        same = Longest(((total, self.reply),))
        lengths = Lengths(self.prompt, same, same, same, "the rows that are run")
        return Setting(self.params, self.shape, placement_of(self.params), lengths)

    def ids(self, row: int, length: int) -> list[int]:
        """Token ids that are neither padding nor the end marker."""
        return [4 + (7 * row + 3 * i) % (self.shape.vocabulary - 4) for i in range(length)]

    def ragged(self, row: int, length: int) -> list[int]:
        """The same, one row in four a token shorter, so that batches are padded as real ones are."""
        return self.ids(row, length - (row % 4 == 1))


def config_of(shape: Shape) -> LlamaConfig:
    """A Llama of this shape."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.positions or 2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        attn_implementation="sdpa",
    )


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def new_policy(subject: Subject) -> LlamaForCausalLM:
    """Random weights in the planned precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config_of(subject.shape))
    return model.to(device(), getattr(torch, subject.setting.placement.precision)).eval()


def new_scalar(subject: Subject, unembedding: bool = False) -> ScalarModel:
    """A scalar model, with the unembedding that a reward model in training keeps where it is not tied."""
    config = config_of(subject.shape)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LlamaForSequenceClassification(config)
        table = torch.randn(subject.shape.vocabulary, subject.shape.hidden) if unembedding else None
    scalar = ScalarModel(model, table).to(device(), getattr(torch, subject.setting.placement.precision))
    return scalar.eval()


def measure(subject: Subject, stages: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Peak bytes by stage and phase, each stage with models of its own."""
    found = {}
    for stage in stages:
        meter: Any = CudaMemory() if torch.cuda.is_available() else TensorMemory()
        with nullcontext() if torch.cuda.is_available() else meter:
            RUNS[stage](subject, meter)
        found[stage] = meter.peaks
    return found


def warmed(engine: LocalEngine) -> LocalEngine:
    """The engine after a step of zero gradients: its optimiser's moments exist, as after the first step of a run."""
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.step()
    return engine


def run_sft(subject: Subject, meter: Meter) -> None:
    """The heaviest step; a full held-out batch."""
    config = subject.params.sft
    model = new_policy(subject)
    engine = warmed(LocalEngine(model, config.optimizer, 10, "sft"))
    rows = [Example(subject.ids(i, subject.prompt), subject.ragged(i, subject.reply)) for i in range(64)]
    task = SftTask(engine, model, rows[: config.batch_size], rows, config, PAD)
    with meter.phase("update"):
        task.train_step(0)
    with meter.phase("step"):
        engine.step()
    with meter.phase("evaluation"):
        task.evaluate()


def run_reward(subject: Subject, meter: Meter) -> None:
    """The heaviest batch of pairs; a full held-out batch."""
    config = subject.params.reward
    model = new_scalar(subject, unembedding=not subject.shape.tied)
    engine = warmed(LocalEngine(model, config.optimizer, 10, "reward"))
    pairs = [
        TokenisedPair(
            i,
            subject.ids(i, subject.prompt),
            subject.ids(i + 1, subject.reply),
            subject.ragged(i + 2, subject.reply),
        )
        for i in range(128)
    ]
    _, count = subject.setting.lengths.pairs.pairs(
        config.batch.token_budget, config.batch.min_pairs, config.batch.max_pairs
    )
    task = RewardTask(engine, model, pairs[:count], pairs, config, PAD, "reward")
    with meter.phase("update"):
        task.train_step(0)
    with meter.phase("step"):
        engine.step()
    with meter.phase("evaluation"):
        task.evaluate()


def run_critic(subject: Subject, meter: Meter) -> None:
    """A rollout of the frozen policy and the critic's steps on it."""
    config, units = subject.params.critic, subject.params.ppo.units
    policy, critic, reward = new_policy(subject), new_scalar(subject), new_scalar(subject)
    policy.requires_grad_(False)
    reward.requires_grad_(False)
    engine = warmed(LocalEngine(critic, config.optimizer, 10, "critic"))
    actors = Actors(policy, policy, critic, model_scorer(reward, units.micro_batch_size))
    experience = _experience(subject, actors, config.batch_size, meter)
    settings = ValueSettings(0.2, micro_batch_size=units.micro_batch_size)
    for minibatch in experience.minibatches(config.minibatches, 0, 0):
        with meter.phase("update critic"):
            accumulate_value_gradient(engine, critic, minibatch, settings)
        with meter.phase("step"):
            engine.step()


def run_ppo(subject: Subject, meter: Meter) -> None:
    """One iteration, as stages/ppo.py keeps its models: judges of their own, and nothing shared."""
    config = subject.params.ppo
    policy, critic = new_policy(subject), new_scalar(subject)
    reference = copy.deepcopy(policy).requires_grad_(False)
    reward, referee = (new_scalar(subject).requires_grad_(False) for _ in range(2))
    judges = [new_scalar(subject) for _ in range(2)]
    learner = Learner(
        config=config,
        sampling=_sampling(subject),
        policy=policy,
        policy_engine=warmed(LocalEngine(policy, config.policy_optimizer, 10, "policy")),
        critic=critic,
        critic_engine=warmed(LocalEngine(critic, config.critic_optimizer, 10, "critic")),
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
        _select(subject, policy, reference, judges)


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


def _rollout(subject: Subject, policy: LlamaForCausalLM, rows: int) -> Rollout:
    sampling = _sampling(subject)
    prompts = [subject.ragged(i, subject.prompt) for i in range(rows)]
    return generate(policy, prompts, philox_uniforms(0, range(rows), sampling.max_new_tokens), sampling)


def _experience(subject: Subject, actors: Actors, rows: int, meter: Meter) -> Experience:
    """What ``ppo.rollout.collect`` does, phase by phase."""
    units = subject.params.ppo.units
    with meter.phase("generation"):
        rollout = _rollout(subject, actors.policy, rows)
    with meter.phase("scoring"):
        scored = score_tokens(actors, rollout, _sampling(subject), units.micro_batch_size)
    with meter.phase("rewards"):
        plain = Rollout(*(value.clone() for value in vars(rollout).values()))
        scores = actors.score(_tokens(plain))
    return assemble(plain, scored, scores, units, RunningMoments(), units.kl.coefficient)


def _tokens(rollout: Rollout) -> Any:
    from rlhf_core.ppo.forward import Tokens

    return Tokens(rollout.tokens, rollout.attention_mask, rollout.response_mask)


def _select(subject: Subject, policy: LlamaForCausalLM, reference: LlamaForCausalLM, judges: list[ScalarModel]) -> None:
    """What evaluation.selection does with a batch of validation prompts."""
    rollout = _rollout(subject, policy, min(subject.params.ppo.selection.prompts, SELECTION_ROWS))
    measure_drift(Sampled([], [rollout], _sampling(subject)), reference)
    for judge in judges:
        model_scorer(judge, SELECTION_ROWS)(_tokens(rollout))


RUNS = {"sft": run_sft, "reward": run_reward, "critic": run_critic, "ppo": run_ppo}

"""Peaks of memory, phase by phase, of the trainers themselves: what ``rlhf plan`` estimates,
measured.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.random_models import (
    PAD,
    Subject,
    frozen_scalar,
    launch_of,
    new_learner,
    new_policy,
    new_scalar,
    sampling_of,
)
from rlhf_core.config.model import OptimizerConfig
from rlhf_core.data.batches import TokenisedPair
from rlhf_core.evaluation.perplexity import measure_drift
from rlhf_core.evaluation.replies import OnPolicyReplies, Reply
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import with_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import PolicyObjective, ValueObjective
from rlhf_core.ppo.reward_sources.source import RewardFn, reward_model_fn
from rlhf_core.ppo.rewards import RunningMeanStd, with_rewards
from rlhf_core.ppo.rollout import predict_tokens
from rlhf_core.ppo.update import Learner, accumulate_policy_gradients, accumulate_ptx_gradient
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.training.engine.base import Engine, joint_step
from rlhf_core.training.engine.factory import build_engine
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.examples import Example
from rlhf_core.training.reward.trainer import RewardTask
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask
from rlhf_extras.memory.dry_run import TensorMemory


class CudaMemory(nullcontext[None]):
    """What the CUDA allocator reports, with the interface of ``TensorMemory``. What was there
    before does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.before = torch.cuda.memory_allocated()

    def restart(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        """The highest number of bytes since."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


class Meter:
    """The highest peak of each phase: the allocator's own figure on a GPU, the bytes of live
    tensors on a CPU.

    Tensors are seen inside ``with meter.memory``.
    """

    def __init__(self) -> None:
        self.memory = CudaMemory() if torch.cuda.is_available() else TensorMemory()
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        self.memory.restart()
        yield
        self.peaks[name] = max(self.memory.peak, self.peaks.get(name, 0))


def measure(subject: Subject, stages: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Peak bytes by stage and phase, each stage with models of its own, one pass at a time."""
    found = {}
    # Products that use all cores leave none for passes side by side, whose tensors the meter would
    # not see.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for stage in stages:
        meter = Meter()
        with meter.memory:
            RUNS[stage](
                subject, meter, RunContext(Path("work"), launch=launch_of(subject.params, stage))
            )
        found[stage] = meter.peaks
    return found


def new_engine(
    model: torch.nn.Module, config: OptimizerConfig, name: str, context: RunContext
) -> Engine:
    """The engine that the stage would build, warmed."""
    if config.lr is None:  # which one changes no memory
        config = config.model_copy(update={"lr": 1e-3})
    return warmed(build_engine(model, config, 10, name, context), model)


def warmed(engine: Engine, model: Any) -> Engine:
    """An engine after a step of zero gradients: its optimiser's moments exist."""
    engine.backward(
        torch.stack(
            [(p.flatten()[:1] * 0).sum() for p in model.parameters() if p.requires_grad]
        ).sum()
    )
    engine.step()
    return engine


def _measure(task: SftTask | RewardTask, model: Any, engine: Engine, meter: Meter) -> None:
    """A step of supervised training and an evaluation."""
    with meter.phase("update"):
        task.train_step(0)
    with meter.phase("step"):
        engine.step()
    with meter.phase("evaluation"):
        task.evaluate(model)


def run_sft(subject: Subject, meter: Meter, context: RunContext) -> None:
    """The heaviest step; a full held-out batch."""
    config = subject.params.sft
    model = new_policy(subject)
    engine = new_engine(model, config.optimizer, "sft", context)
    rows = [
        Example(subject.ids(i, subject.prompt), subject.ragged(i, subject.reply)) for i in range(64)
    ]
    task = SftTask(
        engine,
        model,
        rows[: config.batch_size],
        rows,
        config,
        config.seed,
        PAD,
        context.launch.logits_bytes,
    )
    _measure(task, model, engine, meter)


def run_reward(subject: Subject, meter: Meter, context: RunContext) -> None:
    """The heaviest batch of pairs; a full held-out batch."""
    config = subject.params.reward
    model = new_scalar(subject, unembedding=not subject.architecture.config().tie_word_embeddings)
    engine = new_engine(model, config.optimizer, "reward", context)
    prompt, reply = subject.prompt, subject.reply
    pairs = [
        TokenisedPair(
            i, subject.ids(i, prompt), subject.ids(i + 1, reply), subject.ragged(i + 2, reply)
        )
        for i in range(128)
    ]
    limits = config.batch
    count = (
        subject.inputs.lengths.pairs.pairs(
            limits.token_budget, limits.min_pairs, limits.max_pairs
        ).rows
        // 2
    )
    task = RewardTask(
        engine,
        model,
        pairs[:count],
        pairs,
        config,
        PAD,
        "reward",
        None,
        context.launch.logits_bytes,
    )
    _measure(task, model, engine, meter)


def run_critic(subject: Subject, meter: Meter, context: RunContext) -> None:
    """A rollout of the frozen policy and the critic's steps on it."""
    config, ppo = subject.params.critic, subject.params.ppo
    limits = MicroBatchLimits(ppo.micro_batch_size, ppo.micro_batch_tokens)
    policy, critic, reward = new_policy(subject), new_scalar(subject), new_scalar(subject)
    policy.requires_grad_(False)
    reward.requires_grad_(False)
    engine = new_engine(critic, config.optimizer, "critic", context)
    limit = context.launch.logits_bytes
    pair = ActorCriticPair(policy, critic, {"critic": engine}, sampling_of(subject), limits, limit)
    experience = _experience(
        subject, pair, policy, reward_model_fn(reward, limits), config.batch_size, meter
    )
    for minibatch in experience.minibatches(config.minibatches, 0, 0):
        with meter.phase("update critic"):
            pair.accumulate_value_gradients(minibatch, ValueObjective(0.2))
        with meter.phase("step"):
            engine.step()


def run_ppo(subject: Subject, meter: Meter, context: RunContext) -> None:
    """One iteration, with the models that the stage keeps."""
    params, config, frozen = subject.params, subject.params.ppo, FrozenModels(context.launch)
    learner = new_learner(subject, context, frozen)
    reward, referee = (
        frozen_scalar(subject, of.layers, frozen) for of in (params.reward, params.referee)
    )
    pair, reference = learner.pair, learner.reference
    for engine, model in zip(pair.engines.values(), pair.models, strict=True):
        warmed(engine, model)
    limits = MicroBatchLimits(config.micro_batch_size, config.micro_batch_tokens)
    experience = _experience(
        subject, pair, reference, reward_model_fn(reward, limits), config.batch_size, meter
    )
    with meter.phase("rewards"):
        reward_model_fn(referee, limits)(experience.batch)
    for minibatch in experience.minibatches(config.minibatches, 0, 0):
        _update(learner, pair, minibatch, meter)
    with meter.phase(
        "selection"
    ):  # what evaluation.selection does with a batch of validation prompts
        rows = min(config.selection.prompts, config.selection.batch_size)
        rollout = _rollout(subject, pair.policy, rows)
        replies = [Reply("", finished=True) for _ in range(rows)]
        sampled = OnPolicyReplies(replies, [rollout], [1.0], sampling_of(subject))
        measure_drift(sampled, reference)
        for judge in (reward, referee):
            reward_model_fn(judge, MicroBatchLimits(rows))(rollout.batch)


def _update(learner: Learner, pair: ActorCriticPair, minibatch: Experience, meter: Meter) -> None:
    config = learner.config
    objective = PolicyObjective(config, learner.reference, config.kl.coefficient, 1.0)
    with meter.phase("update policy"):
        accumulate_policy_gradients(pair, minibatch, objective, learner.value_objective)
    if learner.ptx is not None:
        with meter.phase("update ptx"):
            accumulate_ptx_gradient(learner, 0)
    with meter.phase("update critic"):
        pair.accumulate_value_gradients(minibatch, learner.value_objective)
    with meter.phase("step"):
        joint_step(list(pair.engines.values()), 1.0)


def _rollout(
    subject: Subject, policy: PreTrainedModel, rows: int, at_once: int | None = None
) -> Rollout:
    prompts = PromptBatch([subject.ragged(i, subject.prompt) for i in range(rows)], range(rows), 0)
    return sample_replies(LocalSampler.of(policy), 0, prompts, sampling_of(subject), at_once)


def _experience(
    subject: Subject,
    pair: ActorCriticPair,
    reference: Any,
    reward_fn: RewardFn,
    rows: int,
    meter: Meter,
) -> Experience:
    """The phases of an iteration before the update, without the comparison of sampler and
    trainer.
    """
    config = subject.params.ppo.rollout
    with meter.phase("generation"):
        rollout = _rollout(subject, pair.policy, rows, config.sampling_batch_size)
    with meter.phase("scoring"):
        experience = predict_tokens(
            pair, reference, rollout, reference is not pair.policy and config.kl.measures_full
        )
    with meter.phase("rewards"):
        rewards = reward_fn(rollout.batch)
    moments = RunningMeanStd()
    moments.update(rewards)
    experience = with_rewards(experience, rewards, moments, config.kl.coefficient, config)
    return with_advantages(experience, config.advantage)


RUNS = {"sft": run_sft, "reward": run_reward, "critic": run_critic, "ppo": run_ppo}

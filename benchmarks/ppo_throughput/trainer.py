"""The trainer of the PPO stage on random models and prompts: replies of one length, no checkpoints, no health rules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.memory_phases import EOS, PAD, Subject, new_policy, new_scalar, ptx_of, reference_of
from benchmarks.ppo_throughput.roofline import PHASES, launch_of_ppo
from rlhf_core.config.loading import Params, check_params, overridden
from rlhf_core.data.schema import Message
from rlhf_core.memory.architecture import Architecture
from rlhf_core.ppo.actor_critic import ActorCriticPair, build_actor_critic
from rlhf_core.ppo.reward_sources.source import RewardFn, reward_model_fn
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import MicroBatchLimits
from rlhf_core.sampling.vllm import opened_sampler
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.run_context import RunContext

ENDLESS = 1_000_000  # iterations: more than are made


@dataclass(frozen=True)
class Times:
    """Median seconds of an iteration, and of its phases.

    Attributes:
        peak_bytes: The memory of the GPU, if there is one.
        agreement: By how much log-probabilities of sampler and trainer differed in the last iteration.
    """

    iteration: float
    phases: dict[str, float]
    peak_bytes: int | None
    agreement: dict[str, float]


def subject_of(params: Params, architecture: Architecture, prompt: int, reply: int) -> Subject:
    """What is run: the recipe's PPO without warm-up and checkpoints, on lengths of its own."""
    document = params.model_dump(mode="json", by_alias=True, exclude_unset=True)
    changes = {
        "ppo.iterations": ENDLESS,
        "ppo.warmup_iterations": 0,
        "ppo.max_new_tokens": reply,
        "ppo.min_new_tokens": 0,
        "ppo.checkpoint.every": ENDLESS,
    }
    return Subject("ppo", architecture, check_params(overridden(document, changes)), prompt, reply)


def measure(subject: Subject, iterations: int, work: Path) -> Times:
    """Make an iteration to warm up and ``iterations`` more; of several ranks all must call it."""
    context = RunContext(work, launch=launch_of_ppo(subject.params))
    with opened_sampler(subject.params.ppo.sampler, work) as sampler:
        trainer = new_trainer(subject, context)
        trainer.sampler = sampler
        trainer.iterate()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        laps, phases = [], []
        for _ in range(iterations):
            started = time.perf_counter()
            record = trainer.iterate()
            phases.append(record.seconds)
            laps.append(time.perf_counter() - started)
    return Times(
        statistics.median(laps),
        {name: statistics.median(row[f"seconds_{name}"] for row in phases) for name in PHASES},
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        {name: value for name, value in record.metrics.items() if name.startswith("sampl")},
    )


def new_trainer(subject: Subject, context: RunContext) -> Trainer:
    """Policy, reference, critic, reward model and referee as the stage has them, each with weights of its own."""
    params, config = subject.params, subject.params.ppo
    frozen = FrozenModels(context.launch)
    policy = new_policy(subject)
    reference = reference_of(policy, config)
    if config.policy_lora is None:
        reference = frozen.place(reference)
    prompts = [subject.ids(row, subject.prompt) for row in range(config.batch_size)]
    return Trainer(
        learner=Learner(config, _pair(subject, policy, context), reference, ptx_of(subject)),
        reward_fn=_frozen_reward(subject, params.reward.layers, frozen),
        prompts=TrainingPrompts([[Message("user", str(row))] for row in range(len(prompts))], prompts),
        decode=_as_numbers,
        moments=RunningMeanStd(),
        context=context,
        referee=_frozen_reward(subject, params.referee.layers, frozen),
        frozen=frozen,
    )


def _pair(subject: Subject, policy: PreTrainedModel, context: RunContext) -> ActorCriticPair:
    config = subject.params.ppo
    sampling = Sampling(EOS, PAD, subject.reply, config.temperature, min_new_tokens=subject.reply)
    if config.advantage.critic_free:
        return build_actor_critic(config, policy, None, sampling, context)
    critic = new_scalar(_lower(subject, subject.params.reward.layers))
    if config.critic_lora is not None:
        critic.add_adapters(config.critic_lora, 0)
    return build_actor_critic(config, policy, critic, sampling, context)


def _frozen_reward(subject: Subject, layers: int | None, frozen: FrozenModels) -> RewardFn:
    config = subject.params.ppo
    model = frozen.place(new_scalar(_lower(subject, layers)).requires_grad_(False))
    return reward_model_fn(model, MicroBatchLimits(config.micro_batch_size, config.micro_batch_tokens))


def _lower(subject: Subject, layers: int | None) -> Subject:
    return replace(subject, architecture=subject.architecture.lower(layers))


def _as_numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))

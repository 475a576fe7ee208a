"""Random models of a recipe's sizes, with the settings of its stages and sequences of one
length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config.operations import LaunchConfig
from rlhf_core.config.params import Params
from rlhf_core.config.rates import with_chosen_rates
from rlhf_core.data.schema import Message
from rlhf_core.models.adapters import WithoutAdapters, add_adapters
from rlhf_core.models.classifiers import AutoScalarModel
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.kernels import use_kernels
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.ppo.actor_critic import build_actor_critic
from rlhf_core.ppo.reward_sources.source import RewardFn
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.trainer import Trainer
from rlhf_core.ppo.update import Learner, PtxData
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.run_context import RunContext
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.sequence_lengths import LongestSequences, SequenceLengths
from rlhf_extras.memory.stage_plan import EstimateInputs

EOS, PAD = 3, 0


def launch_of(params: Params, stage: str) -> LaunchConfig:
    """How a recipe runs a stage."""
    return {str(name): launch for name, launch in params.compute.launch.items()}.get(
        stage, LaunchConfig()
    )


@dataclass(frozen=True)
class Subject:
    """A shape with settings, and sequences of the longest kind: ``prompt`` and ``reply`` tokens of
    every row.
    """

    name: str
    architecture: Architecture
    params: Params
    prompt: int
    reply: int

    @property
    def inputs(self) -> EstimateInputs:
        """The inputs of the estimate: exactly what is run."""
        longest = LongestSequences(((self.prompt + self.reply, self.reply),))
        lengths = SequenceLengths(self.prompt, longest, longest, longest, "the rows that are run")
        return EstimateInputs(self.params, self.architecture, lengths, Path())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = getattr(torch, self.params.base.dtype)
        return dtype

    def lower(self, layers: int | None) -> Subject:
        """The same with the lowest ``layers`` of its model; None: all."""
        return replace(self, architecture=self.architecture.lower(layers))

    def ids(self, row: int, length: int) -> list[int]:
        """Token ids that are neither padding nor the end marker."""
        return [
            4 + (7 * row + 3 * i) % (self.architecture.config().vocab_size - 4)
            for i in range(length)
        ]

    def ragged(self, row: int, length: int) -> list[int]:
        """The same, one row in four a token shorter, so that batches are padded as real ones
        are.
        """
        return self.ids(row, length - (row % 4 == 1))


def new_policy(subject: Subject) -> PreTrainedModel:
    """Random weights in the planned precision, made on the GPU where there is one."""
    with torch.random.fork_rng(devices=[]), distributed.device():
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(
            subject.architecture.config(), dtype=subject.dtype, attn_implementation="sdpa"
        )
    use_float32_unembedding(model)
    use_kernels(model)
    placed: PreTrainedModel = model.to(distributed.device()).eval()
    return placed


def new_scalar(subject: Subject, unembedding: bool = False) -> ScalarModel:
    """A scalar model, with the unembedding that a reward model in training keeps where it is not
    tied.
    """
    config = subject.architecture.config()
    with torch.random.fork_rng(devices=[]), distributed.device():
        torch.manual_seed(2)
        kind: Any = AutoScalarModel  # whose constructors have no types
        model = kind.from_config(config, dtype=subject.dtype, attn_implementation="sdpa")
        table = (
            torch.randn(config.vocab_size, config.hidden_size, dtype=subject.dtype)
            if unembedding
            else None
        )
    use_kernels(model)
    return ScalarModel(model, table).to(distributed.device()).eval()


def new_learner(subject: Subject, context: RunContext, frozen: FrozenModels) -> Learner:
    """Policy, reference, critic and texts of ptx as the PPO stage has them, each model with weights
    of its own.
    """
    config = with_chosen_rates(subject.params.ppo, new=True)
    policy, critic = new_policy(subject), None
    reference: Any
    if config.policy_lora is None:
        reference = frozen.place(copy.deepcopy(policy).requires_grad_(False))
    else:
        add_adapters(policy, config.policy_lora, 0)
        reference = WithoutAdapters(policy)
    if not config.advantage.critic_free:
        critic = new_scalar(subject.lower(subject.params.reward.layers))
        if config.critic_lora is not None:
            critic.add_adapters(config.critic_lora, 0)
    pair = build_actor_critic(config, policy, critic, sampling_of(subject), context)
    ptx = None
    if config.ptx.weight:
        rows = [
            (subject.ids(i, subject.prompt), subject.ragged(i, subject.reply)) for i in range(32)
        ]
        ptx = PtxData(rows, config.ptx.batch_size, 0, PAD)
    return Learner(config, pair, reference, ptx)


def frozen_scalar(subject: Subject, layers: int | None, frozen: FrozenModels) -> ScalarModel:
    """A reward model or referee as the PPO stage has it."""
    return frozen.place(new_scalar(subject.lower(layers)).requires_grad_(False))


def sampling_of(subject: Subject) -> Sampling:
    """Replies of the settings' full length, whatever is sampled."""
    config = subject.params.ppo
    longest = config.max_new_tokens
    return Sampling(
        EOS, PAD, longest, config.temperature, min_new_tokens=longest, forbidden_ids=(PAD,)
    )


def bare_trainer(
    learner: Learner, reward_fn: RewardFn, ids: list[list[int]], context: RunContext, **more: Any
) -> Trainer:
    """A trainer on prompts of these token ids, without selection and health rules."""
    messages = [[Message("user", str(row))] for row in range(len(ids))]
    return Trainer(
        learner=learner,
        reward_fn=reward_fn,
        prompts=TrainingPrompts(messages, ids),
        decode=lambda reply: " ".join(map(str, reply)),
        moments=RunningMeanStd(),
        context=context,
        **more,
    )

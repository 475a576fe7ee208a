"""A policy that is trained without a critic, in the place of policy and critic.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.ppo.actor_critic_pair import Objective, PolicyMetricsT, ValueMetricsT, accumulate, policy_engine
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.loss_reduction import StepSize
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import Tokens, response_log_distribution
from rlhf_core.training.engine import Engine
from rlhf_core.training.engine.factory import finish
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class PolicyAlone:
    """One model with one engine. Its values are NaN, and what it is asked to do with a value loss it leaves out."""

    policy: PreTrainedModel
    engine: Engine
    sampling: Sampling
    micro_batch_size: int | None = None

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The policy's."""
        return {"policy": self.engine}

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """None."""
        return {}

    def predict(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        """One pass of the policy."""
        values = torch.full(batch.response_mask.shape, math.nan, device=batch.tokens.device)
        return response_log_distribution(self.policy, batch, self.sampling), values

    def log_distribution(self, batch: Tokens) -> Tensor:
        """One pass of the policy."""
        return self.engine.forward(partial(response_log_distribution, self.policy, batch, self.sampling))

    def accumulate_gradients(
        self, minibatch: Experience, policy: Objective[PolicyMetricsT], value: Objective[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, None]:
        """Passes of the policy over the whole minibatch."""

        def loss(batch: Experience, size: StepSize) -> tuple[Tensor, PolicyMetricsT]:
            return policy.loss(self.log_distribution(batch.batch), batch, size)

        return accumulate(self.engine, minibatch, self.micro_batch_size, loss), None

    def accumulate_value_gradients(self, minibatch: Experience, value: Objective[ValueMetricsT]) -> None:
        """Nothing: there is no critic."""

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the engine."""
        return self.engine.full_weights()

    def release_policy(self) -> PreTrainedModel:
        """The policy as its engine leaves it."""
        return finish(self.engine, self.policy)


def policy_alone(config: PpoConfig, policy: PreTrainedModel, sampling: Sampling, context: RunContext) -> PolicyAlone:
    """Build the engine of a policy without a critic, with the schedule of a PPO run."""
    return PolicyAlone(policy, policy_engine(config, policy, context), sampling, config.micro_batch_size)

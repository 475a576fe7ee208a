"""A policy that is trained without a critic, in the place of policy and critic.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.models.lazy_logits import LOGITS_BYTES, LazyLogits
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.learners.actor_critic_pair import PolicyMetricsT, ValueMetricsT, policy_engine
from rlhf_core.ppo.learners.model_passes import PassSettings, accumulate_policy_gradients, score_in_engine
from rlhf_core.ppo.losses.objective import PolicyLoss, ValueLoss
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import Tokens, response_logits
from rlhf_core.sampling.token_statistics import TokenStatistics
from rlhf_core.training.engine import Engine
from rlhf_core.training.engine.factory import finish
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class PolicyAlone(PassSettings):
    """One model with one engine. Its values are NaN, and what it is asked to do with a value loss it leaves out."""

    policy: PreTrainedModel
    engine: Engine
    sampling: Sampling
    micro_batch_size: int | None = None
    logits_bytes: int = LOGITS_BYTES
    micro_batch_tokens: int | None = None

    @property
    def models(self) -> tuple[PreTrainedModel]:
        """The policy."""
        return (self.policy,)

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The policy's."""
        return {"policy": self.engine}

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """None."""
        return {}

    def predict(self, batch: Tokens) -> tuple[LazyLogits, Tensor]:
        """One pass of the policy."""
        values = torch.full(batch.response_mask.shape, math.nan, device=batch.tokens.device)
        return response_logits(self.policy, batch), values

    def score_tokens(
        self, batch: Tokens, *, entropies: bool = False, reference: PreTrainedModel | None = None
    ) -> TokenStatistics:
        """One pass of the policy, and one of the reference."""
        return score_in_engine(self.engine, self.policy, self.scorer, batch, entropies, reference)

    def accumulate_gradients(
        self, minibatch: Experience, policy: PolicyLoss[PolicyMetricsT], value: ValueLoss[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, None]:
        """Passes of the policy over the whole minibatch."""
        metrics = accumulate_policy_gradients(self.engine, self.score_tokens, minibatch, self.limits, policy)
        return metrics, None

    def accumulate_value_gradients(self, minibatch: Experience, value: ValueLoss[ValueMetricsT]) -> None:
        """Nothing: there is no critic."""

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the engine."""
        return self.engine.trained_weights()

    def release_policy(self) -> PreTrainedModel:
        """The policy as its engine leaves it."""
        return finish(self.engine, self.policy)


def policy_alone(config: PpoConfig, policy: PreTrainedModel, sampling: Sampling, context: RunContext) -> PolicyAlone:
    """Build the engine of a policy without a critic, with the schedule of a PPO run."""
    limits = config.micro_batch_size, context.launch.logits_bytes, config.micro_batch_tokens
    return PolicyAlone(policy, policy_engine(config, policy, context), sampling, *limits)

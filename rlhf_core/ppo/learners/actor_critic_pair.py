"""Policy and critic as the phases of PPO see them: two models with two optimisers, or one backbone with two heads.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.models.heads.actor_critic import ActorCritic, policy_weights
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.lazy_logits import LOGITS_BYTES, LazyLogits
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.learners.model_passes import (
    PassSettings,
    accumulate,
    accumulate_policy_gradients,
    frozen_logits,
    score_in_engine,
)
from rlhf_core.ppo.losses.loss_reduction import StepSize
from rlhf_core.ppo.losses.objective import PolicyLoss, ValueLoss
from rlhf_core.ppo.metrics import MetricRecord, total
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.micro_batches import MicroBatchLimits
from rlhf_core.sampling.token_scoring import (
    Tokens,
    TokenScorer,
    logits_and_values,
    response_logits,
    response_values,
)
from rlhf_core.sampling.token_statistics import DistributionScorer, TokenStatistics
from rlhf_core.training.engine import Engine
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.side_by_side import run_side_by_side

PolicyMetricsT = TypeVar("PolicyMetricsT", bound=MetricRecord)
ValueMetricsT = TypeVar("ValueMetricsT", bound=MetricRecord)


class ActorCriticPair(Protocol):
    """Policy and critic in training, over one training distribution."""

    @property
    def policy(self) -> PreTrainedModel:
        """The model that samples."""

    @property
    def models(self) -> tuple[object, ...]:
        """All models of which it consists."""

    @property
    def sampling(self) -> Sampling:
        """The training distribution."""

    @property
    def limits(self) -> MicroBatchLimits:
        """Sequences and positions of one pass."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """All engines by name: ``policy`` and ``critic``, or ``policy`` alone where it trains the value head too."""

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """The engines whose steps leave the policy as it is."""

    @property
    def scorer(self) -> DistributionScorer:
        """Computes log-probabilities, entropies and KL under the training distribution."""

    def predict(self, batch: Tokens) -> tuple[LazyLogits, Tensor]:
        """Logits (B, T + 1, V) and values (B, T; NaN without a critic), outside of any training step."""

    def score_tokens(
        self, batch: Tokens, *, entropies: bool = False, reference: PreTrainedModel | None = None
    ) -> TokenStatistics:
        """What the current policy says of response tokens, in a pass that its engine knows of.

        Args:
            batch: The replies.
            entropies: Whether to compute entropies.
            reference: A model to which to compute the exact KL.
        """

    def accumulate_gradients(
        self, minibatch: Experience, policy: PolicyLoss[PolicyMetricsT], value: ValueLoss[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT | None]:
        """Backward passes of both losses over a minibatch, in micro-batches that never change the gradient.

        Returns:
            The metrics of both; None for those of a critic that there is not.
        """

    def accumulate_value_gradients(
        self, minibatch: Experience, value: ValueLoss[ValueMetricsT]
    ) -> ValueMetricsT | None:
        """Backward passes of the value loss alone; None, and nothing done, where they would move the policy."""

    def policy_weights(self) -> dict[str, Tensor]:
        """The policy's trained weights by its own names, on the CPU of the first rank."""

    def release_policy(self) -> PreTrainedModel:
        """Return the trained policy as a plain model on the first rank, where alone the stage continues."""


@dataclass(frozen=True)
class SeparateActorCritic(PassSettings):
    """Two models, each with an engine of its own.

    ``engines`` are those of the models that are trained: critic pre-training has none for its frozen policy.
    """

    policy: PreTrainedModel
    critic: TokenScorer
    engines: Mapping[str, Engine]
    sampling: Sampling
    micro_batch_size: int | None = None
    logits_bytes: int = LOGITS_BYTES
    micro_batch_tokens: int | None = None

    @property
    def models(self) -> tuple[PreTrainedModel, TokenScorer]:
        """Both."""
        return self.policy, self.critic

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """The critic's."""
        return {"critic": self.engines["critic"]}

    def predict(self, batch: Tokens) -> tuple[LazyLogits, Tensor]:
        """One pass of each model."""
        return response_logits(self.policy, batch), response_values(self.critic, batch)

    def score_tokens(
        self, batch: Tokens, *, entropies: bool = False, reference: PreTrainedModel | None = None
    ) -> TokenStatistics:
        """One pass of the policy, and one of the reference."""
        return score_in_engine(self.engines["policy"], self.policy, self.scorer, batch, entropies, reference)

    def accumulate_gradients(
        self, minibatch: Experience, policy: PolicyLoss[PolicyMetricsT], value: ValueLoss[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT]:
        """Passes of the policy over the whole minibatch, and those of the critic."""
        reference = policy.exact_kl_reference
        policy_metrics, value_metrics = run_side_by_side(
            partial(self.accumulate_policy_gradients, minibatch, policy),
            partial(self.accumulate_value_gradients, minibatch, value),
            models=[*self.models, *([reference] if reference is not None else [])],
        )
        return policy_metrics, value_metrics

    def accumulate_policy_gradients(self, minibatch: Experience, policy: PolicyLoss[PolicyMetricsT]) -> PolicyMetricsT:
        """Passes of the policy over the whole minibatch."""
        return accumulate_policy_gradients(self.engines["policy"], self.score_tokens, minibatch, self.limits, policy)

    def accumulate_value_gradients(self, minibatch: Experience, value: ValueLoss[ValueMetricsT]) -> ValueMetricsT:
        """Passes of the critic over the whole minibatch."""
        engine = self.engines["critic"]

        def loss(batch: Experience, size: StepSize) -> tuple[Tensor, ValueMetricsT]:
            return value.loss(engine.forward(partial(response_values, self.critic, batch.batch)), batch, size)

        return accumulate(engine, minibatch, self.limits, loss)

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the policy's engine."""
        return self.engines["policy"].trained_weights()

    def release_policy(self) -> PreTrainedModel:
        """The policy as its engine leaves it."""
        return finish(self.engines["policy"], self.policy)


@dataclass(frozen=True)
class SharedActorCritic(PassSettings):
    """One backbone with two heads: one engine trains it on the sum of both losses, from one pass."""

    model: ActorCritic
    engine: Engine
    sampling: Sampling
    micro_batch_size: int | None = None
    logits_bytes: int = LOGITS_BYTES
    micro_batch_tokens: int | None = None

    @property
    def models(self) -> tuple[ActorCritic]:
        """The one that there is."""
        return (self.model,)

    @property
    def policy(self) -> PreTrainedModel:
        """The backbone with the language model's head."""
        return self.model.policy

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The one engine."""
        return {"policy": self.engine}

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """None: every step moves the backbone, and the policy with it."""
        return {}

    def predict(self, batch: Tokens) -> tuple[LazyLogits, Tensor]:
        """One pass of the backbone."""
        return logits_and_values(self.model, batch)

    def score_tokens(
        self, batch: Tokens, *, entropies: bool = False, reference: PreTrainedModel | None = None
    ) -> TokenStatistics:
        """One pass of the policy, and one of the reference."""
        return score_in_engine(self.engine, self.policy, self.scorer, batch, entropies, reference)

    def accumulate_gradients(
        self, minibatch: Experience, policy: PolicyLoss[PolicyMetricsT], value: ValueLoss[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT]:
        """One pass of the backbone for both losses."""
        size = StepSize.of(minibatch.response_mask)
        policy_parts, value_parts = [], []
        for batch, weight in minibatch.micro_batches(self.limits):
            tokens, values = self.engine.forward(partial(self._forward, batch.batch, policy))
            policy_loss, policy_metrics = policy.loss(tokens, batch, size)
            value_loss, value_metrics = value.loss(values, batch, size)
            self.engine.backward(weight * (policy_loss + value_loss))
            policy_parts.append((policy_metrics, weight))
            value_parts.append((value_metrics, weight))
        return total(policy_parts), total(value_parts)

    def _forward(self, batch: Tokens, policy: PolicyLoss[PolicyMetricsT]) -> tuple[TokenStatistics, Tensor]:
        logits, values = logits_and_values(self.model, batch)
        reference = frozen_logits(policy.exact_kl_reference, batch)
        return self.scorer.score(logits, batch, entropies=policy.entropy_weight != 0, reference=reference), values

    def accumulate_value_gradients(self, minibatch: Experience, value: ValueLoss[ValueMetricsT]) -> None:
        """Nothing: the value loss alone would move the policy."""

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the engine, without the value head."""
        return policy_weights(self.engine.trained_weights())

    def release_policy(self) -> PreTrainedModel:
        """The policy as the engine leaves it; the value head is no part of it."""
        return finish(self.engine, self.model).policy


@contextmanager
def gathered_parameters(pair: ActorCriticPair) -> Iterator[None]:
    """Inside it every rank holds all weights of both models in training; see ``Engine.gathered_parameters``."""
    with ExitStack() as stack:
        for engine in pair.engines.values():
            stack.enter_context(engine.gathered_parameters())
        yield


def separate_actor_critic(
    config: PpoConfig, policy: PreTrainedModel, critic: ScalarModel, sampling: Sampling, context: RunContext
) -> SeparateActorCritic:
    """Build the engines of two models, with the schedules of a PPO run."""
    assert config.critic_optimizer is not None
    engines = {
        "policy": policy_engine(config, policy, context),
        "critic": _engine(config, critic, config.critic_optimizer, "critic", context),
    }
    limits = config.micro_batch_size, context.launch.logits_bytes, config.micro_batch_tokens
    return SeparateActorCritic(policy, critic, engines, sampling, *limits)


def shared_actor_critic(
    config: PpoConfig, policy: PreTrainedModel, critic: ScalarModel, sampling: Sampling, context: RunContext
) -> SharedActorCritic:
    """Put the critic's head on the policy, and build the one engine with the schedule of a PPO run."""
    model = ActorCritic.with_head_of(critic, policy)
    engine = policy_engine(config, model, context)
    limits = config.micro_batch_size, context.launch.logits_bytes, config.micro_batch_tokens
    return SharedActorCritic(model, engine, sampling, *limits)


def policy_engine(config: PpoConfig, policy: nn.Module, context: RunContext) -> Engine:
    """Build the engine of what ``policy_optimizer`` trains, with the schedule of a PPO run."""
    return _engine(config, policy, config.policy_optimizer, "policy", context)


def _engine(config: PpoConfig, model: nn.Module, optimizer: OptimizerConfig, name: str, context: RunContext) -> Engine:
    per_iteration = config.epochs * config.minibatches
    warmup = config.warmup_iterations * per_iteration or None
    return build_engine(model, optimizer, config.iterations * per_iteration, name, context, warmup)

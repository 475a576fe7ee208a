"""Policy and critic as the phases of PPO see them: two models with two optimisers, or one backbone with two heads.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.models.actor_critic import ActorCritic, policy_weights
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.loss_reduction import StepSize
from rlhf_core.ppo.metrics import MetricRecord, total
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import (
    Tokens,
    TokenScorer,
    policy_and_values,
    response_log_distribution,
    response_values,
)
from rlhf_core.training.engine import Engine
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.run_context import RunContext

Metrics = TypeVar("Metrics", bound=MetricRecord)
PolicyMetricsT = TypeVar("PolicyMetricsT", bound=MetricRecord)
ValueMetricsT = TypeVar("ValueMetricsT", bound=MetricRecord)
MetricsCo = TypeVar("MetricsCo", bound=MetricRecord, covariant=True)


class Objective(Protocol[MetricsCo]):
    """The loss of one model in one optimiser step."""

    def loss(self, outputs: Tensor, batch: Experience, size: StepSize) -> tuple[Tensor, MetricsCo]:
        """The share of one micro-batch in the loss of a step of ``size``, a scalar, and its share in the metrics."""


class ActorCriticPair(Protocol):
    """Policy and critic in training, over one training distribution."""

    @property
    def policy(self) -> PreTrainedModel:
        """The model that samples."""

    @property
    def sampling(self) -> Sampling:
        """The training distribution."""

    @property
    def micro_batch_size(self) -> int | None:
        """Sequences of one pass; None for the default."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """All engines by name: ``policy`` and ``critic``, or ``policy`` alone where it trains the value head too."""

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """The engines whose steps leave the policy as it is."""

    def predict(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        """Log-distribution (B, T, V) and values (B, T; NaN without a critic), outside of any training step."""

    def log_distribution(self, batch: Tokens) -> Tensor:
        """The current policy's log-distribution (B, T, V), in a pass that its engine knows of."""

    def accumulate_gradients(
        self, minibatch: Experience, policy: Objective[PolicyMetricsT], value: Objective[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT | None]:
        """Backward passes of both losses over a minibatch, in micro-batches that never change the gradient.

        Returns:
            The metrics of both; None for those of a critic that there is not.
        """

    def accumulate_value_gradients(
        self, minibatch: Experience, value: Objective[ValueMetricsT]
    ) -> ValueMetricsT | None:
        """Backward passes of the value loss alone; None, and nothing done, where they would move the policy."""

    def policy_weights(self) -> dict[str, Tensor]:
        """The policy's weights by its own names, on the CPU of the first rank."""

    def release_policy(self) -> PreTrainedModel:
        """Return the trained policy as a plain model on the first rank, where alone the stage continues."""


@dataclass(frozen=True)
class SeparateActorCritic:
    """Two models, each with an engine of its own.

    ``engines`` are those of the models that are trained: critic pre-training has none for its frozen policy.
    """

    policy: PreTrainedModel
    critic: TokenScorer
    engines: Mapping[str, Engine]
    sampling: Sampling
    micro_batch_size: int | None = None

    @property
    def critic_engines(self) -> Mapping[str, Engine]:
        """The critic's."""
        return {"critic": self.engines["critic"]}

    def predict(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        """One pass of each model."""
        return response_log_distribution(self.policy, batch, self.sampling), response_values(self.critic, batch)

    def log_distribution(self, batch: Tokens) -> Tensor:
        """One pass of the policy."""
        forward = partial(response_log_distribution, self.policy, batch, self.sampling)
        return self.engines["policy"].forward(forward)

    def accumulate_gradients(
        self, minibatch: Experience, policy: Objective[PolicyMetricsT], value: Objective[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT]:
        """Passes of the policy over the whole minibatch, then those of the critic."""
        return self.accumulate_policy_gradients(minibatch, policy), self.accumulate_value_gradients(minibatch, value)

    def accumulate_policy_gradients(self, minibatch: Experience, policy: Objective[PolicyMetricsT]) -> PolicyMetricsT:
        """Passes of the policy over the whole minibatch."""

        def loss(batch: Experience, size: StepSize) -> tuple[Tensor, PolicyMetricsT]:
            return policy.loss(self.log_distribution(batch.batch), batch, size)

        return accumulate(self.engines["policy"], minibatch, self.micro_batch_size, loss)

    def accumulate_value_gradients(self, minibatch: Experience, value: Objective[ValueMetricsT]) -> ValueMetricsT:
        """Passes of the critic over the whole minibatch."""
        engine = self.engines["critic"]

        def loss(batch: Experience, size: StepSize) -> tuple[Tensor, ValueMetricsT]:
            return value.loss(engine.forward(partial(response_values, self.critic, batch.batch)), batch, size)

        return accumulate(engine, minibatch, self.micro_batch_size, loss)

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the policy's engine."""
        return self.engines["policy"].full_weights()

    def release_policy(self) -> PreTrainedModel:
        """The policy as its engine leaves it."""
        return finish(self.engines["policy"], self.policy)


@dataclass(frozen=True)
class SharedActorCritic:
    """One backbone with two heads: one engine trains it on the sum of both losses, from one pass."""

    model: ActorCritic
    engine: Engine
    sampling: Sampling
    micro_batch_size: int | None = None

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

    def predict(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        """One pass of the backbone."""
        return policy_and_values(self.model, batch, self.sampling)

    def log_distribution(self, batch: Tokens) -> Tensor:
        """One pass of the policy."""
        return self.engine.forward(partial(response_log_distribution, self.policy, batch, self.sampling))

    def accumulate_gradients(
        self, minibatch: Experience, policy: Objective[PolicyMetricsT], value: Objective[ValueMetricsT]
    ) -> tuple[PolicyMetricsT, ValueMetricsT]:
        """One pass of the backbone for both losses."""
        size = StepSize.of(minibatch.response_mask)
        policy_parts, value_parts = [], []
        for batch, weight in minibatch.micro_batches(self.micro_batch_size):
            forward = partial(policy_and_values, self.model, batch.batch, self.sampling)
            log_probabilities, values = self.engine.forward(forward)
            policy_loss, policy_metrics = policy.loss(log_probabilities, batch, size)
            value_loss, value_metrics = value.loss(values, batch, size)
            self.engine.backward(weight * (policy_loss + value_loss))
            policy_parts.append((policy_metrics, weight))
            value_parts.append((value_metrics, weight))
        return total(policy_parts), total(value_parts)

    def accumulate_value_gradients(self, minibatch: Experience, value: Objective[ValueMetricsT]) -> None:
        """Nothing: the value loss alone would move the policy."""

    def policy_weights(self) -> dict[str, Tensor]:
        """Gathered by the engine, without the value head."""
        return policy_weights(self.engine.full_weights())

    def release_policy(self) -> PreTrainedModel:
        """The policy as the engine leaves it; the value head is no part of it."""
        return finish(self.engine, self.model).policy


def accumulate(
    engine: Engine,
    minibatch: Experience,
    micro_batch_size: int | None,
    loss_of: Callable[[Experience, StepSize], tuple[Tensor, Metrics]],
) -> Metrics:
    """Backward passes of one loss over a minibatch; returns the metrics of the whole minibatch over all ranks."""
    size = StepSize.of(minibatch.response_mask)
    parts = []
    for batch, weight in minibatch.micro_batches(micro_batch_size):
        loss, metrics = loss_of(batch, size)
        engine.backward(weight * loss)
        parts.append((metrics, weight))
    return total(parts)


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
    return SeparateActorCritic(policy, critic, engines, sampling, config.micro_batch_size)


def shared_actor_critic(
    config: PpoConfig, policy: PreTrainedModel, critic: ScalarModel, sampling: Sampling, context: RunContext
) -> SharedActorCritic:
    """Put the critic's head on the policy, and build the one engine with the schedule of a PPO run."""
    model = ActorCritic.with_head_of(critic, policy)
    engine = policy_engine(config, model, context)
    return SharedActorCritic(model, engine, sampling, config.micro_batch_size)


def policy_engine(config: PpoConfig, policy: nn.Module, context: RunContext) -> Engine:
    """Build the engine of what ``policy_optimizer`` trains, with the schedule of a PPO run."""
    return _engine(config, policy, config.policy_optimizer, "policy", context)


def _engine(config: PpoConfig, model: nn.Module, optimizer: OptimizerConfig, name: str, context: RunContext) -> Engine:
    per_iteration = config.epochs * config.minibatches
    warmup = config.warmup_iterations * per_iteration or None
    return build_engine(model, optimizer, config.iterations * per_iteration, name, context, warmup)

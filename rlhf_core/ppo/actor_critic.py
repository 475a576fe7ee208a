"""Policy and critic in training: two models, one backbone with two heads, or a policy alone.

Shapes: B sequences, T response positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config.model import OptimizerConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.models.forward import LOGITS_BYTES, LazyLogits
from rlhf_core.models.heads import ActorCritic, ScalarModel
from rlhf_core.ppo.experience import Experience, MicroExperience
from rlhf_core.ppo.losses import ValueObjective, step_totals
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import (
    MicroBatchLimits,
    Tokens,
    logits_and_values,
    response_logits,
    response_values,
    token_statistics,
)
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.passes import Scalar, Share, gradient_shares
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class ActorCriticPair:
    """The models of one training distribution, and the engines of those that are trained.

    Attributes:
        policy: The model that samples.
        critic: A model of its own, or an ``ActorCritic``, whose ``policy`` is the same one and
            whose one engine trains both on the sum of their losses; None with critic-free
            advantages.
        engines: By name: ``policy``, and ``critic`` where it is a model of its own. Critic
            pre-training has none for its frozen policy.
        sampling: The training distribution.
        limits: Sequences and positions of one pass.
        logits_bytes: Bytes of float32 logits that may exist at a time.
        whole: Whether every rank gathers all weights for passes outside of training steps, as it
            must in order to sample; else sharded ones stay so, and all ranks make the same passes.
    """

    policy: PreTrainedModel
    critic: ScalarModel | ActorCritic | None
    engines: Mapping[str, Engine]
    sampling: Sampling
    limits: MicroBatchLimits = field(default_factory=MicroBatchLimits)
    logits_bytes: int = LOGITS_BYTES
    whole: bool = True

    @property
    def models(self) -> tuple[object, ...]:
        """All models of which it consists."""
        if isinstance(self.critic, ActorCritic):
            return (self.critic,)
        if self.critic is None:
            return (self.policy,)
        return (self.policy, self.critic)

    def predict(self, batch: Tokens) -> tuple[LazyLogits, Tensor]:
        """Logits (B, T + 1, V) and values (B, T), outside of any training step.

        Values are NaN without a critic.
        """
        if isinstance(self.critic, ActorCritic):
            return logits_and_values(self.critic, batch)
        return response_logits(self.policy, batch), self.values(batch)

    def values(self, batch: Tokens) -> Tensor:
        """Values (B, T) by a critic of its own, outside of any training step.

        They are NaN without a critic.
        """
        if self.critic is None:
            return torch.full(batch.response_mask.shape, math.nan, device=batch.tokens.device)
        assert not isinstance(self.critic, ActorCritic)
        return response_values(self.critic, batch)

    def statistics(
        self, logits: LazyLogits, batch: Tokens, entropies: bool, reference: PreTrainedModel | None
    ) -> dict[str, Tensor]:
        """See :func:`token_statistics`.

        ``reference`` is a frozen model to which to compute the exact KL.
        """
        with torch.no_grad():
            other = None
            if reference is not None:
                other = response_logits(reference, batch)
        return token_statistics(
            logits, batch, self.sampling, self.logits_bytes, entropies=entropies, reference=other
        )

    def accumulate_value_gradients(
        self, minibatch: Experience, objective: ValueObjective
    ) -> list[Share]:
        """Backward passes of the loss of a critic that is a model of its own."""
        critic = self.critic
        totals = step_totals(minibatch.response_mask)
        assert critic is not None and not isinstance(critic, ActorCritic)

        def compute(batch: MicroExperience) -> tuple[Tensor, dict[str, Scalar]]:
            return objective.loss(response_values(critic, batch.batch), batch, totals)

        return gradient_shares(
            self.engines["critic"], minibatch.micro_batches(self.limits), compute
        )

    def policy_weights(self) -> dict[str, Tensor]:
        """The policy's trained weights by its own names, gathered on the CPU of the first rank."""
        weights = self.engines["policy"].trained_weights()
        if not isinstance(self.critic, ActorCritic):
            return weights
        return {
            name.removeprefix("policy."): weights[name]
            for name in weights
            if name.startswith("policy.")
        }

    def release_policy(self) -> PreTrainedModel:
        """Return the trained policy as a plain model on the first rank.

        The caller continues there alone.
        """
        if isinstance(self.critic, ActorCritic):
            return finish(self.engines["policy"], self.critic).policy
        return finish(self.engines["policy"], self.policy)


@contextmanager
def readable(pair: ActorCriticPair, *names: str) -> Iterator[ActorCriticPair]:
    """Yield the pair for passes outside of training steps.

    Of the models ``names``, or of all that are trained.
    """
    engines = {name: pair.engines[name] for name in names or pair.engines}
    with ExitStack() as stack:
        if pair.whole:
            for engine in engines.values():
                stack.enter_context(engine.gathered_parameters())
            yield pair
        else:
            readers = {
                name: reader
                for name, engine in engines.items()
                if (reader := engine.reader()) is not None
            }
            yield replace(pair, **readers)
            for reader in readers.values():
                reader.let_go()


def build_actor_critic(
    config: PpoConfig,
    policy: PreTrainedModel,
    critic: ScalarModel | None,
    sampling: Sampling,
    context: RunContext,
) -> ActorCriticPair:
    """Build the engines with the schedules of a PPO run.

    ``critic_mode: shared`` puts the value head on the policy.
    """

    def engine(model: nn.Module, optimizer: OptimizerConfig, name: str) -> Engine:
        per_iteration = config.epochs * config.minibatches
        warmup = config.warmup * per_iteration or None
        return build_engine(
            model, optimizer, config.iterations * per_iteration, name, context, warmup
        )

    limits = (
        MicroBatchLimits(config.micro_batch_size, config.micro_batch_tokens),
        context.launch.logits_bytes,
    )
    # With LoRA, the reference is the policy without adapters.
    whole = config.sampler.kind == "local" or config.policy_lora is not None
    if critic is not None and config.critic_mode == "shared":
        both = ActorCritic.with_head_of(critic, policy)
        engines = {"policy": engine(both, config.policy_optimizer, "policy")}
        return ActorCriticPair(policy, both, engines, sampling, *limits, whole)
    engines = {"policy": engine(policy, config.policy_optimizer, "policy")}
    if critic is not None:
        assert config.critic_optimizer is not None
        engines["critic"] = engine(critic, config.critic_optimizer, "critic")
    return ActorCriticPair(policy, critic, engines, sampling, *limits, whole)

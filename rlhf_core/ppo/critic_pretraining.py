"""Critic pre-training: values are fitted to the frozen policy's returns.

It ends at a threshold (algorithms.md §3).

Rewards are normalised, clipped and penalised as in PPO, and the running moments are handed on with
the critic. Source: paper, section 5.3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.policy import CriticConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.errors import TrainingPaused
from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.advantages import explained_variance, with_advantages
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.losses import ValueObjective, clip_and_step
from rlhf_core.ppo.reward_sources.source import RewardFn, reward_metrics
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.ppo.trainer import PhaseClock, RolloutLoop
from rlhf_core.sampling.sampler import LocalSampler, Sampler
from rlhf_core.training.checkpoints.manager import CheckpointManager, RunCheckpoints
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import History
from rlhf_core.training.passes import totals_of_steps
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

CONSTANT_ROLLOUTS = 5  # after so many rollouts a reward that has never varied ends the run
FALLS_BY = 0.99  # a value loss counts as fallen when it is below this share of the best one


@dataclass
class StopRule:
    """Decides when the critic is good enough, or no longer improves.

    Plain numbers, so that it can be saved.
    """

    threshold: float
    patience: int
    plateau: int
    reached: int = 0
    best_loss: float | None = None
    since_best: int = 0

    def observe(self, variance: float, loss: float) -> str | None:
        """Take in one rollout; why to stop, or None.

        ``variance`` is explained variance before the update.
        """
        if variance >= self.threshold:
            self.reached += 1
        else:
            self.reached = 0
        # A loss that is not finite is that of a skipped step: no later one is below it, and no
        # checkpoint can hold it.
        if math.isfinite(loss) and (self.best_loss is None or loss < FALLS_BY * self.best_loss):
            self.best_loss = loss
            self.since_best = 0
        else:
            self.since_best += 1
        if self.reached >= self.patience:
            return "threshold"
        return "plateau" if self.since_best >= self.plateau else None


@dataclass
class CriticTrainer(RolloutLoop):
    """One pre-training run.

    Attributes:
        config: The run's own settings.
        rollout: The settings that it shares with PPO.
        pair: The frozen policy, which is its own reference (so that every KL is zero), and the
            critic with its engine.
        reward_fn: Raw rewards of replies.
        prompts: The prompts.
        context: Where metrics are logged and the partial state is kept.
        moments: Running moments of raw rewards.
        frozen: The models that are only read.
        sampler: Samples the rollouts.
    """

    config: CriticConfig
    rollout: RolloutConfig
    pair: ActorCriticPair
    reward_fn: RewardFn
    prompts: TrainingPrompts
    context: RunContext
    moments: RunningMeanStd = field(default_factory=RunningMeanStd)
    frozen: FrozenModels = field(default_factory=FrozenModels)
    sampler: Sampler = field(default_factory=LocalSampler)

    name = "critic"
    unit = "rollout"

    def __post_init__(self) -> None:
        config = self.config
        work = self.context.work
        self.seed = config.seed
        self.total = config.max_rollouts
        self.least_scored = config.minibatches
        self.stop_rule = StopRule(config.explained_variance, config.patience, config.plateau)
        self.history = History(work / "history.jsonl")
        self.checkpoints = RunCheckpoints(
            CheckpointManager(work / "checkpoints", self.context.store),
            self.pair.engines,
            {"history": self.history},
            config.checkpoint.keep,
        )
        self.done = 0
        self.stopped = ""
        self.explained_variance = 0.0

    def summary(self) -> dict[str, float]:
        """What there is to say of the finished run."""
        return {
            "rollouts": self.done,
            "explained_variance": self.explained_variance,
            "reached_threshold": float(self.stopped == "threshold"),
            "moments_mean": self.moments.mean,
            "moments_std": self.moments.std,
        }

    def finished(self) -> bool:
        """Whether the critic is good enough, no longer improves, or has had all its rollouts."""
        return bool(self.stopped) or super().finished()

    def turn(self) -> dict[str, float]:
        """Make one iteration."""
        row = self.iterate()
        if self.done % self.config.checkpoint.every == 0 or self.stopped:
            self.save()
        return {"explained_variance": self.explained_variance, "value_loss": row["value_loss"]}

    def iterate(self) -> dict[str, float]:
        """Make one iteration: collect, rewards, advantages, update of the critic, log."""
        config = self.config
        pair = self.pair
        clock = PhaseClock()
        rows = self.prompts.rows(
            config.batch_size, derive_seed(config.seed, "critic", "prompts"), self.done
        )
        experience = self.collect(
            pair, pair.policy, self.rollout, rows, self.rollout.kl.coefficient, clock
        )
        with clock.phase("advantages"):
            experience = with_advantages(experience, self.rollout.advantage).learnable()
            self.explained_variance = explained_variance(
                experience.values, experience.monte_carlo_returns, experience.response_mask
            )
        with clock.phase("update"):
            metrics = self._update(experience)
        self.done += 1
        self.stopped = self.stop_rule.observe(self.explained_variance, metrics["value_loss"]) or ""
        clock.end()
        row = {
            "explained_variance": self.explained_variance,
            **metrics,
            "reward_mean": float(experience.rewards.mean()),
            "reward_std": float(experience.rewards.std(unbiased=False)),
            "length": float(experience.lengths.float().mean()),
            **reward_metrics(self.reward_fn),
            **clock.seconds,
        }
        self.history.append({"iteration": self.done, **row})
        self.context.tracker.log_metrics(row, step=self.done)
        if self.done >= CONSTANT_ROLLOUTS and self.moments.constant:
            raise TrainingPaused(
                f"critic paused: all {self.moments.count} replies so far got the same reward, {self.moments.mean:g}, "
                "which leaves nothing to predict or to learn. Try the reward on replies by hand: it may be a check "
                "that never holds, or always"
            )
        return row

    def _update(self, experience: Experience) -> dict[str, float]:
        """Make all optimiser steps of the critic on one rollout.

        Returns means over them, and how many were skipped.
        """
        config, objective = self.config, ValueObjective(self.config.value_clip)
        seed = derive_seed(config.seed, "critic", "minibatches")
        shares = []
        results = []
        for epoch in range(config.epochs):
            number = self.done * config.epochs + epoch
            for minibatch in experience.minibatches(config.minibatches, seed, number):
                shares.append(self.pair.accumulate_value_gradients(minibatch, objective))
                results.append(clip_and_step(self.pair.engines, "separate", None)["critic"])
        steps = config.epochs * config.minibatches
        losses = [step["value_loss"] for step in totals_of_steps(shares)]
        norms = [result.grad_norm for result in results]
        skipped = [result.skipped for result in results]
        return {
            "value_loss": sum(losses) / steps,
            "critic_grad_norm": sum(norms) / steps,
            "skipped_steps": float(sum(skipped)),
        }

    def meta(self) -> dict[str, Any]:
        """Whether and how far the critic is from the end of its training."""
        rule = self.stop_rule
        return super().meta() | {
            "stop_rule": [rule.reached, rule.best_loss, rule.since_best],
            "stopped": self.stopped,
            "explained_variance": self.explained_variance,
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        super().load_meta(meta)
        self.stop_rule.reached, self.stop_rule.best_loss, self.stop_rule.since_best = meta[
            "stop_rule"
        ]
        self.stopped = meta["stopped"]
        self.explained_variance = meta["explained_variance"]

"""Critic pre-training: values are fitted to the frozen policy's returns, up to a threshold (algorithms.md §3).

Rewards are normalised, clipped and penalised as in PPO, and the running moments are handed on with the critic. Source:
paper, section 5.3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_core.config.stages.critic import CriticConfig
from rlhf_core.config.stages.ppo import RolloutConfig
from rlhf_core.ppo.advantages.gae import explained_variance, with_advantages
from rlhf_core.ppo.checkpoints.rollback_journal import RollbackJournal
from rlhf_core.ppo.checkpoints.run_checkpoint import JsonLines, RunCheckpoints
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.learners.actor_critic_pair import SeparateActorCritic, gathered_parameters
from rlhf_core.ppo.losses.grad_clip import clip_and_step
from rlhf_core.ppo.losses.value_loss import ValueObjective
from rlhf_core.ppo.metrics import MetricRecord, PhaseClock
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd
from rlhf_core.ppo.rewards.token_rewards import RewardFn, reward_metrics, with_rewards
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts
from rlhf_core.ppo.rollouts.rollout import score_rollout
from rlhf_core.runtime.progress import progress
from rlhf_core.sampling.data_parallel import sample_replies
from rlhf_core.sampling.local import LocalSampler
from rlhf_core.sampling.sampler import Sampler
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

FALLS_BY = 0.99  # a value loss counts as fallen when it is below this share of the best one


@dataclass
class StopRule:
    """Decides when the critic is good enough, or no longer improves. Plain numbers, so that it can be saved."""

    threshold: float
    patience: int
    plateau: int
    reached: int = 0
    best_loss: float | None = None
    since_best: int = 0

    def observe(self, variance: float, loss: float) -> str | None:
        """Take in one rollout; why to stop, or None. ``variance`` is explained variance before the update."""
        self.reached = self.reached + 1 if variance >= self.threshold else 0
        if self.best_loss is None or loss < FALLS_BY * self.best_loss:
            self.best_loss, self.since_best = loss, 0
        else:
            self.since_best += 1
        if self.reached >= self.patience:
            return "threshold"
        return "plateau" if self.since_best >= self.plateau else None


@dataclass(frozen=True)
class ValueUpdateMetrics(MetricRecord):
    """The critic's steps on one rollout: means over the steps, and how many were skipped as not finite."""

    value_loss: float
    critic_grad_norm: float
    skipped_steps: float


@dataclass
class CriticTrainer:
    """One pre-training run.

    Attributes:
        config: The run's own settings.
        rollout: The settings that it shares with PPO.
        pair: The frozen policy, which is its own reference (so that every KL is zero), and the critic with its engine.
        reward_fn: Raw rewards of replies.
        prompts: The prompts.
        context: Where metrics are logged and the partial state is kept.
        moments: Running moments of raw rewards.
        frozen: The models that are only read.
        sampler: Samples the rollouts.
    """

    config: CriticConfig
    rollout: RolloutConfig
    pair: SeparateActorCritic
    reward_fn: RewardFn
    prompts: TrainingPrompts
    context: RunContext
    moments: RunningMeanStd = field(default_factory=RunningMeanStd)
    frozen: FrozenModels = field(default_factory=FrozenModels)
    sampler: Sampler = field(default_factory=LocalSampler)

    def __post_init__(self) -> None:
        config = self.config
        self.stop_rule = StopRule(config.explained_variance, config.patience, config.plateau)
        self.history = JsonLines(self.context.work / "history.jsonl")
        self.checkpoints = RunCheckpoints(
            CheckpointManager(self.context.work / "checkpoints", self.context.store),
            self.pair.engines,
            {"history": self.history},
            RollbackJournal(self.context.work / "rollbacks.json"),  # always empty: no rule watches this run
            config.checkpoint.keep,
        )
        self.done, self.stopped, self.explained_variance = 0, "", 0.0

    def run(self) -> dict[str, float]:
        """Pre-train, resuming where an earlier process stopped.

        Returns:
            The summary of the run.

        Raises:
            Preempted: SIGTERM came; the rollout was finished and the state saved.
            CheckpointError: A checkpoint could not be written.
        """
        self.restore()
        total, preemption, manager = self.config.max_rollouts, self.context.preemption, self.checkpoints.manager
        with manager, progress(total, "critic") as bar, preemption.deferred():
            if self.done:
                bar.advance(self.done)
            while not (preempted := preemption.requested()) and not self.stopped and self.done < total:
                row = self.iterate()
                bar.advance(1, explained_variance=self.explained_variance, value_loss=row["value_loss"])
                if self.done % self.config.checkpoint.every == 0 or self.stopped:
                    self.save()
                manager.check()
            if preempted:
                if self.done and not self.checkpoints.holds(self.done):
                    self.save(extra=True)
                manager.finish()
                preemption.raise_preempted(f"critic made rollout {self.done} of {total}", saved=self.done > 0)
        return {
            "rollouts": self.done,
            "explained_variance": self.explained_variance,
            "reached_threshold": float(self.stopped == "threshold"),
            "moments_mean": self.moments.mean,
            "moments_std": self.moments.std,
        }

    def iterate(self) -> dict[str, float]:
        """Make one iteration: collect, rewards, advantages, update of the critic, log."""
        config, pair, clock = self.config, self.pair, PhaseClock()
        rows = self.prompts.rows(config.batch_size, derive_seed(config.seed, "critic", "prompts"), self.done)
        prompts = self.prompts.batch(rows, self.done, derive_seed(config.seed, "critic", "rollout"))

        with self.frozen.on_device(), gathered_parameters(pair):
            with clock.phase("generation"):
                if self.sampler.version is None:  # the policy is frozen: one version of it is all there is
                    self.sampler.sync(pair.policy, 0)
                rollout = sample_replies(self.sampler, 0, prompts, pair.sampling, self.rollout.sampling_batch_size)
            with clock.phase("forward"):
                experience = score_rollout(pair, pair.policy, rollout, exact_kl=False)
            with clock.phase("rewards"):
                rewards = self.reward_fn(experience.batch)
        self.moments.update(rewards)
        experience = with_rewards(experience, rewards, self.moments, self.rollout.kl.coefficient, self.rollout)
        experience = with_advantages(experience, self.rollout.advantage)

        self.explained_variance = explained_variance(
            experience.values, experience.monte_carlo_returns, experience.response_mask
        )
        metrics = self._update(experience)
        self.done += 1
        self.stopped = self.stop_rule.observe(self.explained_variance, metrics.value_loss) or ""
        row = {
            "iteration": self.done,
            "explained_variance": self.explained_variance,
            **metrics.as_metrics(),
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std(unbiased=False)),
            "length": float(experience.lengths.float().mean()),
            **reward_metrics(self.reward_fn),
            **clock.seconds,
        }
        self.history.append(row)
        self.context.tracker.log_metrics(row, step=self.done)
        return row

    def _update(self, experience: Experience) -> ValueUpdateMetrics:
        """Make all optimiser steps of the critic on one rollout."""
        config, objective = self.config, ValueObjective(self.config.value_clip)
        seed = derive_seed(config.seed, "critic", "minibatches")
        losses, results = [], []
        for epoch in range(config.epochs):
            number = self.done * config.epochs + epoch
            for minibatch in experience.minibatches(config.minibatches, seed, number):
                losses.append(float(self.pair.accumulate_value_gradients(minibatch, objective).value_loss))
                results.append(clip_and_step(self.pair.engines, "separate", None)["critic"])
        steps = config.epochs * config.minibatches
        return ValueUpdateMetrics(
            value_loss=sum(losses) / steps,
            critic_grad_norm=sum(result.grad_norm for result in results) / steps,
            skipped_steps=float(sum(result.skipped for result in results)),
        )

    def save(self, extra: bool = False) -> None:
        """Write a checkpoint of the run as it is; ``extra``: see ``RunCheckpoints.save``."""
        meta = {
            "moments": self.moments.to_dict(),
            "stop_rule": [self.stop_rule.reached, self.stop_rule.best_loss, self.stop_rule.since_best],
            "stopped": self.stopped,
            "explained_variance": self.explained_variance,
        }
        self.checkpoints.save(self.done, meta, extra)

    def restore(self) -> None:
        """Go to the newest checkpoint, if there is one."""
        restored = self.checkpoints.load()
        if restored is None:
            return
        self.done, meta = restored
        self.moments = RunningMeanStd.from_dict(meta["moments"])
        self.stop_rule.reached, self.stop_rule.best_loss, self.stop_rule.since_best = meta["stop_rule"]
        self.stopped, self.explained_variance = meta["stopped"], meta["explained_variance"]

"""Critic pre-training: the policy is frozen, the critic learns its returns to a threshold (algorithms.md §3).

Rewards are treated exactly as in PPO, and the running moments found here are handed on with the critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_core.config.critic import CriticConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.data.batching import batch_at
from rlhf_core.ppo.advantages import explained_variance
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.reward_sources.mixture import source_figures
from rlhf_core.ppo.rewards import RunningMeanStd
from rlhf_core.ppo.rollout import Actors, collect
from rlhf_core.ppo.run_checkpoint import Lines, RunFiles
from rlhf_core.ppo.value_loss import ValueSettings, accumulate_value_gradient
from rlhf_core.progress import progress
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.token_scoring import TokenScorer
from rlhf_core.training.engine import Engine
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


@dataclass
class CriticTrainer:
    """One pre-training run. ``actors.policy`` is its own reference: it is frozen, so every KL is zero."""

    config: CriticConfig
    units: RolloutConfig
    actors: Actors
    critic: TokenScorer
    engine: Engine
    sampling: Sampling
    prompt_ids: Sequence[Sequence[int]]
    context: RunContext
    moments: RunningMeanStd = field(default_factory=RunningMeanStd)
    frozen: FrozenModels = field(default_factory=FrozenModels)

    def __post_init__(self) -> None:
        config = self.config
        self.rule = StopRule(config.explained_variance, config.patience, config.plateau)
        self.history = Lines(self.context.work / "history.jsonl")
        lines = {"history": self.history}
        self.files = RunFiles(
            self.context.work / "checkpoints",
            {"critic": self.engine},
            lines,
            config.checkpoint.keep,
            self.context.store,
        )
        self.done, self.stopped, self.variance = 0, "", 0.0

    def run(self) -> dict[str, float]:
        """Pre-train, resuming where an earlier process stopped; returns the summary. ``Preempted`` after the rollout in
        which SIGTERM came, with the state saved."""
        self._resume()
        preemption = self.context.preemption
        with progress(self.config.max_rollouts, "critic") as shown, preemption.deferred():
            if self.done:
                shown.advance(self.done)
            while not (leaving := preemption.requested()) and not self.stopped and self.done < self.config.max_rollouts:
                row = self._rollout()
                self.history.append(row)
                self.context.tracker.log_metrics(row, step=self.done)
                shown.advance(1, explained_variance=self.variance, value_loss=row["value_loss"])
                if self.done % self.config.checkpoint.every == 0 or self.stopped:
                    self._save()
            if leaving:
                self._leave()
        return {
            "rollouts": self.done,
            "explained_variance": self.variance,
            "reached_threshold": float(self.stopped == "threshold"),
            "moments_mean": self.moments.mean,
            "moments_std": self.moments.std,
        }

    def _leave(self) -> None:
        if self.done and not self.files.holds(self.done):
            self._save(extra=True)
        self.context.preemption.raise_preempted(
            f"critic made rollout {self.done} of {self.config.max_rollouts}", saved=self.done > 0
        )

    def _rollout(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        experience = self._collect(seconds)
        mask = experience.response_mask
        self.variance = explained_variance(experience.values, experience.monte_carlo, mask)
        figures = self._update(experience)
        self.done += 1
        self.stopped = self.rule.observe(self.variance, figures["value_loss"]) or ""
        return {
            "iteration": self.done,
            "explained_variance": self.variance,
            **figures,
            "reward_mean": float(experience.scores.mean()),
            "reward_std": float(experience.scores.std(unbiased=False)),
            "length": float(experience.lengths.float().mean()),
            **source_figures(self.actors.score),
            **seconds,
        }

    def _collect(self, seconds: dict[str, float]) -> Experience:
        size, seed = self.config.batch_size, self.config.seed
        rows = batch_at(len(self.prompt_ids), size, derive_seed(seed, "critic", "prompts"), self.done)
        with self.frozen.on_device(), self.engine.gathered_parameters():
            return collect(
                self.actors,
                [self.prompt_ids[row] for row in rows],
                range(self.done * size, (self.done + 1) * size),
                derive_seed(seed, "critic", "rollout"),
                self.sampling,
                self.units,
                self.moments,
                self.units.kl.coefficient,
                seconds=seconds,
            )

    def _update(self, experience: Experience) -> dict[str, float]:
        """All optimiser steps on one rollout; means over the steps."""
        settings = ValueSettings(self.config.value_clip, micro_batch_size=self.units.micro_batch_size)
        seed = derive_seed(self.config.seed, "critic", "minibatches")
        sums = {"value_loss": 0.0, "critic_grad_norm": 0.0, "skipped_steps": 0.0}
        steps = self.config.epochs * self.config.minibatches
        for epoch in range(self.config.epochs):
            number = self.done * self.config.epochs + epoch
            for minibatch in experience.minibatches(self.config.minibatches, seed, number):
                sums["value_loss"] += accumulate_value_gradient(self.engine, self.critic, minibatch, settings)[
                    "value_loss"
                ]
                result = self.engine.step()
                sums["critic_grad_norm"] += result.grad_norm
                sums["skipped_steps"] += result.skipped
        return {name: value if name == "skipped_steps" else value / steps for name, value in sums.items()}

    def _save(self, extra: bool = False) -> None:
        meta = {
            "moments": self.moments.to_dict(),
            "rule": [self.rule.reached, self.rule.best_loss, self.rule.since_best],
            "stopped": self.stopped,
            "variance": self.variance,
        }
        self.files.save(self.done, meta, extra=extra)

    def _resume(self) -> None:
        found = self.files.load()
        if found is None:
            return
        self.done, meta = found
        self.moments = RunningMeanStd.from_dict(meta["moments"])
        self.rule.reached, self.rule.best_loss, self.rule.since_best = meta["rule"]
        self.stopped, self.variance = meta["stopped"], meta["variance"]

"""The PPO loop (algorithms.md §3 to 8). One iteration reads collect, rewards, advantages, update, log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.models.precision import matmul_precision
from rlhf_core.ppo.advantages.estimate import estimate_advantages
from rlhf_core.ppo.advantages.group_advantages import GroupMetrics
from rlhf_core.ppo.callbacks.callback import IterationRecord, TrainerCallback
from rlhf_core.ppo.checkpoints.rollback_journal import RollbackJournal
from rlhf_core.ppo.checkpoints.run_checkpoint import JsonLines, RunCheckpoints
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.learners.actor_critic_pair import gathered_parameters
from rlhf_core.ppo.losses.importance_sampling import with_fixed_reference
from rlhf_core.ppo.metrics import PhaseClock
from rlhf_core.ppo.rewards.kl import KlController, kl_pull
from rlhf_core.ppo.rewards.reward_normalization import RunningMeanStd
from rlhf_core.ppo.rewards.token_rewards import RewardFn, reward_metrics, with_rewards
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts
from rlhf_core.ppo.rollouts.rollout import score_rollout
from rlhf_core.ppo.rollouts.rollout_metrics import RolloutMetrics
from rlhf_core.ppo.update import Learner, UpdateMetrics, update
from rlhf_core.runtime import distributed
from rlhf_core.runtime.progress import progress
from rlhf_core.sampling.data_parallel import sample_replies
from rlhf_core.sampling.local import LocalSampler
from rlhf_core.sampling.sampler import Sampler
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext


@dataclass
class Trainer:
    """One PPO run.

    Attributes:
        learner: Policy and critic with their engines, the reference, the ptx texts, and the switches.
        reward_fn: Raw rewards of replies.
        prompts: The prompts.
        decode: Text of a reply's tokens, without its end marker.
        moments: Running moments of raw rewards from critic pre-training; they go on being updated.
        context: Where metrics are logged and the partial state is kept.
        callbacks: What happens around an iteration, in this order: selection, health.
        referee: A second reward function, for metrics only, every ``referee_every``-th iteration.
        frozen: The models that are only read.
        sampler: Samples the rollouts.
    """

    learner: Learner
    reward_fn: RewardFn
    prompts: TrainingPrompts
    decode: Callable[[list[int]], str]
    moments: RunningMeanStd
    context: RunContext
    callbacks: Sequence[TrainerCallback] = ()
    referee: RewardFn | None = None
    frozen: FrozenModels = field(default_factory=FrozenModels)
    sampler: Sampler = field(default_factory=LocalSampler)

    def __post_init__(self) -> None:
        self.config, work = self.learner.config, self.context.work
        self.kl_controller = KlController(self.config.kl)
        self.history, self.samples = JsonLines(work / "history.jsonl"), JsonLines(work / "samples.jsonl")
        self.checkpoints = RunCheckpoints(
            CheckpointManager(work / "checkpoints", self.context.store),
            self.learner.pair.engines,
            {"history": self.history, "samples": self.samples},
            RollbackJournal(work / "rollbacks.json"),
            self.config.checkpoint.keep,
        )
        self.done = 0  # iterations

    def run(self) -> None:
        """Train to the configured number of iterations, resuming where an earlier process stopped.

        Raises:
            TrainingPaused: A callback stopped the run, or steps kept being non-finite; the last checkpoint before that
                is kept, so that the same run pauses again at the same place.
            Preempted: SIGTERM came; the iteration was finished and the state saved.
            CheckpointError: A checkpoint could not be written.
        """
        self.restore()
        total, preemption, manager = self.config.iterations, self.context.preemption, self.checkpoints.manager
        with manager, progress(total, "ppo") as bar, preemption.deferred():
            for callback in self.callbacks:
                callback.on_start(self)
            if self.done:
                bar.advance(self.done)
            while not (preempted := preemption.requested()) and self.done < total:
                before = self.done
                record = self.iterate()
                labels = {"reward": "reward_mean", "kl": "kl", "length": "length"}
                bar.advance(self.done - before, **{label: record.metrics[name] for label, name in labels.items()})
                manager.check()
            if preempted:
                # After a rollback the state is that of a checkpoint and the journal.
                if self.done and not self.checkpoints.holds(self.done):
                    self.save(extra=True)
                manager.finish()
                preemption.raise_preempted(f"ppo made iteration {self.done} of {total}", saved=self.done > 0)

    def iterate(self) -> IterationRecord:
        """Make one PPO iteration: collect, rewards, advantages, update, log."""
        config, learner, pair = self.config, self.learner, self.learner.pair
        kl_coef, clock = self.kl_controller.value, PhaseClock()
        prompt_seed = derive_seed(config.seed, "ppo", "prompts")
        rows = self.prompts.rows(config.batch_size, prompt_seed, self.done, config.replies_per_prompt)
        prompts = self.prompts.batch(rows, self.done, self._rollout_seed())

        with self.frozen.on_device(), gathered_parameters(pair):
            with clock.phase("generation"):
                self.sampler.sync(pair.policy, self.done)
                rollout = sample_replies(self.sampler, self.done, prompts, pair.sampling, config.sampling_batch_size)
            with clock.phase("forward"):
                experience = score_rollout(pair, learner.reference, rollout, config.kl.measures_full)
            with clock.phase("rewards"):
                rewards = self.reward_fn(experience.batch)
        self.moments.update(rewards)
        experience = with_rewards(experience, rewards, self.moments, kl_coef, config.rollout)
        experience = estimate_advantages(experience, config.advantage, config.replies_per_prompt)
        if config.surrogate.fixed_reference:
            experience = with_fixed_reference(experience)

        with clock.phase("update"):
            update_metrics = update(learner, experience, kl_coef, self.done)

        replies = [self.decode(ids) for ids in experience.replies()]
        metrics = self._metrics(experience, replies, update_metrics, kl_coef)
        self.kl_controller.update(metrics["kl"], len(experience))
        self.done += 1
        texts = [self.prompts.messages[row][-1].content for row in rows]
        record = IterationRecord(
            self.done, experience, texts, replies, metrics, clock.seconds, paused=update_metrics.paused
        )
        for callback in self.callbacks:
            callback.after_update(self, record)
        self.context.tracker.log_metrics(record.metrics | record.seconds, step=self.done)
        self.history.append({"iteration": self.done} | record.metrics | record.seconds | record.notes)
        for callback in self.callbacks:
            callback.after_log(self, record)
        if self.done == record.iteration:  # no callback went back to an earlier checkpoint
            if record.paused is not None:
                raise record.paused
            if self.done % config.checkpoint.every == 0 or self.done == config.iterations:
                self.save()
        return record

    def _rollout_seed(self) -> int:
        # After a rollback other replies are drawn, so that one unlucky draw does not fail the run twice.
        rollbacks = len(self.checkpoints.journal)
        return derive_seed(self.config.seed, "ppo", "rollout", *([rollbacks] if rollbacks else []))

    def _metrics(
        self, experience: Experience, replies: list[str], update_metrics: UpdateMetrics, kl_coef: float
    ) -> dict[str, float]:
        """All metrics of an iteration, the first rank's on every rank: every later decision follows from them."""
        with self.frozen.on_device():
            referee = self.referee if self.done % self.config.referee_every == 0 else None
            referee_rewards = referee(experience.batch) if referee is not None else None
            precision = matmul_precision(self.learner.pair.policy)
            with_critic = not self.config.advantage.critic_free
            rollout_metrics = RolloutMetrics.of(
                experience, replies, referee_rewards, precision, with_critic, self.config.kl.measures_full
            )
        metrics = rollout_metrics.as_metrics() | update_metrics.as_metrics() | reward_metrics(self.reward_fn)
        metrics |= {
            "moments_mean": self.moments.mean,
            "moments_std": self.moments.std,
            "kl_coefficient": kl_coef,
            "kl_pull": kl_pull(experience.shaped_rewards, kl_coef),
            "ptx_weight": self.config.ptx.weight,
            "padding_share_scoring": self.learner.pair.limits.padding_share(experience.batch),
        }
        if self.config.replies_per_prompt > 1:
            metrics |= GroupMetrics.of(experience, self.config.replies_per_prompt).as_metrics()
        return dict(distributed.broadcast_from_rank0(metrics))

    def save(self, extra: bool = False) -> None:
        """Write a checkpoint of the run as it is; ``extra``: see ``RunCheckpoints.save``."""
        meta = {
            "moments": self.moments.to_dict(),
            "kl_coef": self.kl_controller.value,
            "callbacks": {callback.name: callback.state() for callback in self.callbacks},
        }
        self.checkpoints.save(self.done, meta, extra)

    def restore(self) -> None:
        """Go to the newest checkpoint that no rollback has abandoned, with the settings that rollbacks changed."""
        restored = self.checkpoints.load()
        if restored is None:
            return
        self.done, meta = restored
        moments = RunningMeanStd.from_dict(meta["moments"])
        self.moments.count, self.moments.mean, self.moments.variance = moments.count, moments.mean, moments.variance
        factor = self.checkpoints.journal.factor("kl_coefficient", meta["rollbacks"])
        self.kl_controller.value = float(meta["kl_coef"]) * factor
        states: dict[str, Any] = meta["callbacks"]
        for callback in self.callbacks:
            callback.load_state(states[callback.name])

"""The PPO loop (algorithms.md §3 to 8).

One iteration reads collect, rewards, advantages, update, log.

Critic pre-training goes the same way up to the advantages, so both share one loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.errors import DataError
from rlhf_core.models.precision import matmul_precision
from rlhf_core.ppo.actor_critic import ActorCriticPair, readable
from rlhf_core.ppo.advantages import estimate_advantages, group_metrics
from rlhf_core.ppo.checkpoints import JOURNAL, RollbackCheckpoints, RollbackJournal
from rlhf_core.ppo.experience import Experience, IterationRecord
from rlhf_core.ppo.health import HealthGuard
from rlhf_core.ppo.kl import KlController, kl_pull
from rlhf_core.ppo.losses import with_fixed_reference
from rlhf_core.ppo.reward_sources.source import RewardFn, reward_metrics
from rlhf_core.ppo.rewards import RunningMeanStd, with_rewards
from rlhf_core.ppo.rollout import TrainingPrompts, rollout_metrics, score_rollout
from rlhf_core.ppo.selection import CheckpointSelector
from rlhf_core.ppo.update import Learner, UpdateResult, update
from rlhf_core.runtime import distributed
from rlhf_core.runtime.progress import within_step
from rlhf_core.sampling.sampler import LocalSampler, Sampler, sample_replies
from rlhf_core.training.checkpoints.manager import CheckpointManager
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import History
from rlhf_core.training.loop import ResumableLoop
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext


class PhaseClock:
    """Measures the wall-clock time of an iteration's phases, as metrics ``seconds_NAME``.

    The time between them is ``seconds_rest``, so that no second is missing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, on a GPU until its last kernel has ended; a phase may have several."""
        started = time.perf_counter()
        yield
        if distributed.device().type == "cuda":
            torch.cuda.synchronize()
        before = self.seconds.get(f"seconds_{name}", 0.0)
        self.seconds[f"seconds_{name}"] = before + time.perf_counter() - started

    def end(self) -> None:
        """Count all time since the clock was made that lies in no phase as the rest."""
        taken = time.perf_counter() - self.started
        self.seconds["seconds_rest"] = taken - sum(self.seconds.values())


class RolloutLoop(ResumableLoop):
    """What PPO and critic pre-training share.

    It is the way from prompts to rewarded replies, whose moments they keep.
    """

    prompts: TrainingPrompts
    reward_fn: RewardFn
    moments: RunningMeanStd
    frozen: FrozenModels
    sampler: Sampler
    seed: int
    least_scored: int  # replies of a rollout, one for each of its optimiser steps

    def meta(self) -> dict[str, Any]:
        """The running moments of raw rewards."""
        return {"moments": self.moments.to_dict()}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        self.moments = RunningMeanStd.from_dict(meta["moments"])

    def collect(
        self,
        pair: ActorCriticPair,
        reference: PreTrainedModel,
        config: RolloutConfig,
        rows: Sequence[int],
        kl_coef: float,
        clock: PhaseClock,
        *,
        redraws: int = 0,
        exact_kl: bool = False,
        every: int = 1,
    ) -> Experience:
        """Sample replies to the prompts ``rows``, score and reward them.

        The result is a rollout without advantages.

        Args:
            pair: Policy and critic. A frozen policy is given to the sampler once.
            reference: The frozen SFT policy.
            config: Settings of rollouts.
            rows: Numbers of the prompts.
            kl_coef: Weight of the KL penalty.
            clock: Measures the phases.
            redraws: Draws other replies than with any other number.
            exact_kl: Whether the KL over the vocabulary is computed.
            every: The policy scores one of so many replies; see :func:`score_rollout`.
        """
        names: list[str | int] = [self.name, "rollout"]
        if redraws:
            names.append(redraws)
        seed = derive_seed(self.seed, *names)
        prompts = self.prompts.batch(rows, self.done, seed)
        trained = "policy" in pair.engines
        with self.frozen.on_device(), readable(pair) as seen:
            with clock.phase("generation"):
                version = self.done if trained else 0
                if trained or self.sampler.version is None:
                    self.sampler.sync(seen.policy, version)
                rollout = sample_replies(
                    self.sampler, version, prompts, pair.sampling, config.sampling_batch_size
                )
            within_step("scored replies", 0, len(rows))
            with clock.phase("forward"):
                experience = score_rollout(seen, reference, rollout, exact_kl, every)
            within_step("rewarded replies", 0, len(rows))
            with clock.phase("rewards"):
                rewards = self.reward_fn(experience.batch)
        unscored = getattr(self.reward_fn, "unscored", None)
        if unscored is not None:
            scored = int((~unscored).sum())
            if scored < self.least_scored:
                raise DataError(
                    f"the reward function could score {scored} of the {len(unscored)} replies of a rollout (it gave "
                    f"None for the others, or took too long), and {self.least_scored} are needed: look at what it "
                    "says of the first ones"
                )
        with clock.phase("advantages"):
            self.moments.update(rewards)
            return with_rewards(experience, rewards, self.moments, kl_coef, config, unscored)


@dataclass
class Trainer(RolloutLoop):
    """One PPO run.

    Attributes:
        learner: Policy and critic with their engines, the reference, the ptx texts, and the
            switches.
        reward_fn: Raw rewards of replies.
        prompts: The prompts.
        decode: Text of a reply's tokens, without its end marker.
        moments: Running moments of raw rewards from critic pre-training; they go on being updated.
        context: Where metrics are logged and the partial state is kept.
        selector: Measures checkpoints and keeps the weights of the best one; None keeps the last.
        health: Applies the health rules; None lets the run go on whatever happens.
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
    selector: CheckpointSelector | None = None
    health: HealthGuard | None = None
    referee: RewardFn | None = None
    frozen: FrozenModels = field(default_factory=FrozenModels)
    sampler: Sampler = field(default_factory=LocalSampler)

    name = "ppo"
    unit = "iteration"

    def __post_init__(self) -> None:
        self.config = self.learner.config
        work = self.context.work
        self.seed = self.config.seed
        self.total = self.config.iterations
        self.least_scored = self.config.minibatches
        self.kl_controller = KlController(self.config.kl)
        self.history = History(work / "history.jsonl")
        self.samples = History(work / "samples.jsonl")
        self.checkpoints: RollbackCheckpoints = RollbackCheckpoints(
            CheckpointManager(work / "checkpoints", self.context.store),
            self.learner.pair.engines,
            {"history": self.history, "samples": self.samples},
            self.config.checkpoint.keep,
            journal=RollbackJournal(work / JOURNAL),
        )
        self.done = 0

    def needs_start(self) -> bool:
        """Whether a health rule may roll back to the start, which is not saved yet."""
        return self.health is not None and self.health.needs_start(self.checkpoints)

    def turn(self) -> dict[str, float]:
        """Make one iteration."""
        metrics = self.iterate().metrics
        return {"reward": metrics["reward_mean"], "kl": metrics["kl"], "length": metrics["length"]}

    def iterate(self) -> IterationRecord:
        """Make one PPO iteration: collect, rewards, advantages, update, log."""
        config = self.config
        learner = self.learner
        kl_coef = self.kl_controller.value
        clock = PhaseClock()
        prompt_seed = derive_seed(config.seed, "ppo", "prompts")
        rows = self.prompts.rows(
            config.batch_size, prompt_seed, self.done, config.replies_per_prompt
        )
        # After a rollback other replies are drawn, so that one unlucky draw does not fail the run
        # twice.
        redraws = len(self.checkpoints.journal)
        exact_kl = config.kl.measures_full
        experience = self.collect(
            learner.pair, learner.reference, config, rows, kl_coef, clock, redraws=redraws, exact_kl=exact_kl,
            every=config.importance_sampling_correction.scored_every,
        )  # fmt: skip
        with clock.phase("advantages"):
            experience = estimate_advantages(
                experience, config.advantage, config.replies_per_prompt
            )
            if config.surrogate.fixed_reference:
                experience = with_fixed_reference(experience)

        with clock.phase("update"):
            updated = update(learner, experience.learnable(), kl_coef, self.done)

        with clock.phase("metrics"):
            replies = [self.decode(ids) for ids in experience.batch.replies()]
        metrics = self._metrics(experience, replies, updated, kl_coef, clock)
        self.kl_controller.update(metrics["kl"], len(experience))
        self.done += 1
        texts = [self.prompts.messages[row][-1].content for row in rows]
        record = IterationRecord(
            self.done, experience, texts, replies, metrics, clock.seconds, paused=updated.paused
        )
        if self.selector is not None:
            last = self.done == config.iterations
            self.selector.consider(
                record, learner.pair, self.frozen, self.checkpoints, self.samples, last
            )
        if self.health is not None:
            self.health.observe(record, self.checkpoints.journal)
        clock.end()
        self.context.tracker.log_metrics(record.metrics | record.seconds, step=self.done)
        self.history.append(
            {"iteration": self.done} | record.metrics | record.seconds | record.notes
        )
        back = None
        if self.health is not None:
            back = self.health.rollback(record, self.checkpoints)
        if back is not None:
            self.context.tracker.log_metrics({"rollback_to": back.to_iteration}, step=self.done)
            self.checkpoints.roll_back(back)
            self.restore()
        elif record.paused is not None:
            raise record.paused
        elif self.done % config.checkpoint.every == 0 or self.done == config.iterations:
            self.save()
        return record

    def _metrics(
        self,
        experience: Experience,
        replies: list[str],
        updated: UpdateResult,
        kl_coef: float,
        clock: PhaseClock,
    ) -> dict[str, float]:
        """All metrics of an iteration, the first rank's on every rank.

        Every later decision follows from them.
        """
        config = self.config
        pair = self.learner.pair
        referee_rewards: Tensor | None = None
        if self.referee is not None and self.done % config.referee_every == 0:
            with clock.phase("referee"), self.frozen.on_device():
                referee_rewards = self.referee(experience.batch)
        with clock.phase("metrics"):
            precision = matmul_precision(pair.policy)
            with_critic = not config.advantage.critic_free
            metrics = rollout_metrics(
                experience,
                replies,
                referee_rewards,
                precision,
                with_critic,
                config.kl.measures_full,
            )
            metrics |= updated.metrics | reward_metrics(self.reward_fn)
            metrics |= {
                "moments_mean": self.moments.mean,
                "moments_std": self.moments.std,
                "kl_coefficient": kl_coef,
                "kl_pull": kl_pull(experience.shaped_rewards, kl_coef),
                "ptx_weight": config.ptx.weight,
                "padding_share_scoring": pair.limits.padding_share(experience.batch),
            }
            if config.replies_per_prompt > 1:
                metrics |= group_metrics(experience, config.replies_per_prompt)
            return dict(distributed.broadcast_from_rank0(metrics))

    def meta(self) -> dict[str, Any]:
        """The moments, the coefficient, and the states of selection and health."""
        selection = {}
        if self.selector is not None:
            selection = {"selection": self.selector.state()}
        health = {}
        if self.health is not None:
            health = {"health": self.health.state()}
        return super().meta() | {"kl_coef": self.kl_controller.value, **selection, **health}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Undo :meth:`meta`, with the settings that rollbacks changed since."""
        super().load_meta(meta)
        factor = self.checkpoints.journal.factor("kl_coefficient", meta["rollbacks"])
        self.kl_controller.value = float(meta["kl_coef"]) * factor
        if self.selector is not None:
            self.selector.load_state(meta["selection"])
        if self.health is not None:
            self.health.load_state(meta["health"])

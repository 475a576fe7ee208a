"""Checkpoint selection during training.

It goes by the referee's win rate against SFT under limits, never by the reward.

Choosing the checkpoint of the highest reward is the very error that the paper's title names
(algorithms.md §9). The trainer knows no judge: what measures a policy is given to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.config.ppo import SelectionConfig
from rlhf_core.errors import DataError
from rlhf_core.ppo.actor_critic import ActorCriticPair, readable
from rlhf_core.ppo.checkpoints import RollbackCheckpoints, holds_best, prune_best, save_best
from rlhf_core.ppo.experience import IterationRecord
from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.manager import not_of_one_run
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import History, none_as_nan, nonfinite_as_none

SAMPLES = 8
NORMAL_95 = 1.96  # half an interval of 95 % in standard errors
# Of the selection's metrics these keep their names; the others would collide with those of the
# rollout.
SELECTION_METRICS = ("win_rate", "win_rate_low95", "win_rate_high95", "referee_gap")

# ``win_rate`` against SFT, ``kl``, ``length_ratio`` and ``repetition_increase`` over SFT's, and
# further metrics.
MeasurePolicy = Callable[[PreTrainedModel], Mapping[str, float]]


@dataclass(frozen=True)
class CheckpointCandidate:
    """What the choice among checkpoints is made on."""

    iteration: int
    win_rate: float
    kl: float
    length_ratio: float
    repetition_increase: float
    win_rate_error: float = 0.0  # standard error

    def replaces(self, kept: CheckpointCandidate) -> bool:
        """Whether this later checkpoint is kept in place of ``kept``.

        It is if the referee prefers it by more than a standard error. Where the difference is
        smaller, a win rate of a few hundred prompts says nothing, and the checkpoint nearer to SFT
        by KL is kept.
        """
        gain = self.win_rate - kept.win_rate
        if abs(gain) > max(self.win_rate_error, kept.win_rate_error):
            return gain > 0
        return self.kl < kept.kl

    def broken_limits(self, limits: SelectionConfig) -> list[str]:
        """Describe the limits that this checkpoint breaks; empty when it is admissible.

        NaN breaks every limit.
        """
        within_limit = {
            f"KL {self.kl:z.2f} > {limits.max_kl:g}": self.kl <= limits.max_kl,
            f"length {self.length_ratio:.2f} times SFT's > {limits.max_length_ratio:g}": (
                self.length_ratio <= limits.max_length_ratio
            ),
            f"repetition {self.repetition_increase:+z.3f} > +{limits.max_repetition_increase:g}": (
                self.repetition_increase <= limits.max_repetition_increase
            ),
        }
        return [description for description, holds in within_limit.items() if not holds]


@dataclass(frozen=True)
class CheckpointChoice:
    """The chosen checkpoint, whether it keeps all limits, and why it was chosen."""

    candidate: CheckpointCandidate
    admissible: bool
    reason: str


def choose(candidates: Sequence[CheckpointCandidate], limits: SelectionConfig) -> CheckpointChoice:
    """Choose the admissible checkpoint that the referee prefers.

    Of equally good ones the nearest to SFT.

    They are compared in their order, as they come while training goes on
    (:meth:`CheckpointCandidate.replaces`), so that only the best weights so far have to be kept.
    When none is admissible the one of the lowest KL is chosen and marked so: a run must end with
    some policy, and the gate decides whether it is good enough. Method ``last`` takes the newest.

    Raises:
        DataError: There are no candidates.
    """
    if not candidates:
        raise DataError(
            "no checkpoint was evaluated; set ppo.selection.every to at most ppo.iterations"
        )
    if limits.method == "last":
        last = candidates[-1]
        admissible_last = not last.broken_limits(limits)
        return CheckpointChoice(
            last, admissible_last, "the last checkpoint, as ppo.selection.method says"
        )
    admissible = [c for c in candidates if not c.broken_limits(limits)]
    if not admissible:
        nearest = min(candidates, key=lambda c: (not math.isfinite(c.kl), c.kl, c.iteration))
        broken = "; ".join(nearest.broken_limits(limits))
        return CheckpointChoice(
            nearest, False, f"no checkpoint keeps all limits ({broken}); lowest KL taken"
        )
    best = admissible[0]
    for candidate in admissible[1:]:
        best = candidate if candidate.replaces(best) else best
    compared = f"of {len(admissible)} admissible checkpoints"
    reason = (
        f"referee win rate {best.win_rate:.3f}, the best {compared}, or as good and nearer to SFT"
    )
    return CheckpointChoice(best, True, reason)


class CheckpointSelector:
    """Measures the policy every ``config.every`` iterations and after the last one.

    The best weights are in ``folder``.

    Sample replies of the same iterations go to ``samples``.
    """

    def __init__(self, measure: MeasurePolicy, config: SelectionConfig, folder: Path) -> None:
        self.measure = measure
        self.config = config
        self.folder = folder
        self.candidates: list[CheckpointCandidate] = []
        self.best = 0

    def consider(
        self,
        record: IterationRecord,
        pair: ActorCriticPair,
        frozen: FrozenModels,
        checkpoints: RollbackCheckpoints,
        samples: History,
        last: bool,
    ) -> None:
        """Measure the policy if it is due, and add the result to the record.

        It is not measured where steps kept being non-finite.

        The best weights are written with the next checkpoint; ``last`` says that the run ends with
        this iteration.
        """
        if record.paused is not None or not (last or record.iteration % self.config.every == 0):
            return
        started = time.perf_counter()
        with frozen.on_device(), readable(pair, "policy") as seen:
            # One result for all ranks, however their last digits may differ.
            metrics = dict(distributed.broadcast_from_rank0(self.measure(seen.policy)))
        decisive = {
            name: metrics[name]
            for name in ("win_rate", "kl", "length_ratio", "repetition_increase")
        }
        low = metrics.get("win_rate_low95")
        high = metrics.get("win_rate_high95")
        error = 0.0
        if low is not None and high is not None:
            error = (high - low) / (2 * NORMAL_95)
        self.candidates.append(
            CheckpointCandidate(record.iteration, **decisive, win_rate_error=error)
        )
        keep = self.choice().candidate.iteration == record.iteration
        weights = pair.policy_weights() if keep else None
        self.best = record.iteration if keep else self.best
        # A checkpoint that the run may go back to refers to the best weights of its time.
        needed = {meta["selection"]["best"] for meta in checkpoints.metas().values()} | {self.best}

        def write() -> None:
            if weights is not None:
                save_best(self.folder, record.iteration, weights)
            prune_best(self.folder, needed)

        checkpoints.manager.attach(write)
        for name, value in metrics.items():
            shown = name if name in SELECTION_METRICS else f"selection_{name}"
            record.metrics[shown] = value
        record.seconds["seconds_selection"] = time.perf_counter() - started
        rows = zip(record.prompts, record.replies, record.experience.rewards.tolist(), strict=True)
        for prompt, reply, reward in list(rows)[:SAMPLES]:
            samples.append(
                {"iteration": record.iteration, "prompt": prompt, "reply": reply, "score": reward}
            )

    def choice(self) -> CheckpointChoice:
        """The checkpoint to keep of those seen so far."""
        return choose(self.candidates, self.config)

    def state(self) -> dict[str, Any]:
        """The candidates and the best iteration so far as JSON.

        Numbers that are not finite are null.
        """
        return {
            "candidates": [nonfinite_as_none(asdict(seen)) for seen in self.candidates],
            "best": self.best,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.candidates = []
        for row in state["candidates"]:
            numbers: dict[str, Any] = {name: none_as_nan(value) for name, value in row.items()}
            self.candidates.append(CheckpointCandidate(**numbers))
        self.best = int(state["best"])
        kept = (
            self.best == 0 or not distributed.is_rank_zero() or holds_best(self.folder, self.best)
        )
        if not distributed.broadcast_from_rank0(kept):
            what = f"{self.folder} does not hold the best weights, those of iteration {self.best},"
            raise not_of_one_run(self.folder.parent, self.candidates[-1].iteration, what)

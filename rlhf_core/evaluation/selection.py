"""Checkpoint selection: the referee's win rate against SFT under limits, never the reward.

Choosing the checkpoint of the highest reward is the very error that the paper's title names (algorithms.md §9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from transformers import PreTrainedModel

from rlhf_core.config.stages.ppo import SelectionConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare, tie_margin_of
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.metrics.drift import measure_drift
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.replies.generation import OnPolicyReplies

SampleReplies = Callable[[PreTrainedModel], OnPolicyReplies]


@dataclass(frozen=True)
class SelectionMetrics:
    """One checkpoint on the fixed validation prompts.

    Attributes:
        win_rate: The referee's win rate against SFT, with bootstrap bounds ``_low95`` and ``_high95``.
        kl: Nats per sequence to SFT.
        length: Mean tokens per reply; ``length_ratio`` is over SFT's.
        repetition: Share of repeated trigrams; ``repetition_increase`` is minus SFT's.
        missing_eos: Share of replies without end marker.
        special_tokens: Share of replies with special tokens inside.
        referee_gap: By how many standard deviations of SFT's scores the reward's gain exceeds the referee's; None
            without a reward model.
    """

    win_rate: float
    win_rate_low95: float
    win_rate_high95: float
    kl: float
    length: float
    length_ratio: float
    repetition: float
    repetition_increase: float
    missing_eos: float
    special_tokens: float
    referee_gap: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Return the metrics that are known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CheckpointCandidate:
    """What the choice among checkpoints is made on; see :class:`SelectionMetrics`."""

    iteration: int
    win_rate: float
    kl: float
    length_ratio: float
    repetition_increase: float

    @classmethod
    def of(cls, iteration: int, metrics: SelectionMetrics) -> CheckpointCandidate:
        """The checkpoint after ``iteration``, whose metrics are ``metrics``."""
        return cls(iteration, metrics.win_rate, metrics.kl, metrics.length_ratio, metrics.repetition_increase)

    def broken_limits(self, limits: SelectionConfig) -> list[str]:
        """Describe the limits that this checkpoint breaks; empty when it is admissible. NaN breaks every limit."""
        within_limit = {
            f"KL {self.kl:.2f} > {limits.max_kl:g}": self.kl <= limits.max_kl,
            f"length {self.length_ratio:.2f} times SFT's > {limits.max_length_ratio:g}": (
                self.length_ratio <= limits.max_length_ratio
            ),
            f"repetition +{self.repetition_increase:.3f} > +{limits.max_repetition_increase:g}": (
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

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON for the PPO metrics."""
        return {**asdict(self.candidate), "admissible": self.admissible, "reason": self.reason}


def choose(candidates: Sequence[CheckpointCandidate], limits: SelectionConfig) -> CheckpointChoice:
    """Choose the highest referee win rate among admissible checkpoints; equal ones by lower KL, then by iteration.

    When none is admissible the one of the lowest KL is chosen and marked so: a run must end with some policy, and the
    gate decides whether it is good enough.

    Raises:
        DataError: There are no candidates.
    """
    if not candidates:
        raise DataError("no checkpoint was evaluated; set ppo.selection.every to at most ppo.iterations")
    admissible = [c for c in candidates if not c.broken_limits(limits)]
    if not admissible:
        nearest = min(candidates, key=lambda c: (not np.isfinite(c.kl), c.kl, c.iteration))
        broken = "; ".join(nearest.broken_limits(limits))
        return CheckpointChoice(nearest, False, f"no checkpoint keeps all limits ({broken}); lowest KL taken")
    best = min(admissible, key=lambda c: (-c.win_rate, c.kl, c.iteration))
    reason = f"highest referee win rate {best.win_rate:.3f} of {len(admissible)} admissible checkpoints"
    return CheckpointChoice(best, True, reason)


class SelectionEvaluator:
    """Measures checkpoints on fixed prompts against SFT, whose replies are sampled and judged once.

    Args:
        reference: The SFT model.
        prompts: The fixed validation prompts.
        referee: The judge that decides.
        sample: Samples a model's replies to ``prompts`` from the training distribution, with the same random numbers
            for every model: the metrics are then a function of the weights alone, and a resumed run repeats them.
        reward: The reward model that the policy is optimised against, for ``referee_gap`` only.
        tie_margin: Differences up to this share of the spread of SFT's scores are ties.
        seed: Seed of the bootstrap.
    """

    def __init__(
        self,
        reference: PreTrainedModel,
        prompts: Sequence[Sequence[Message]],
        referee: Judge,
        sample: SampleReplies,
        reward: Judge | None = None,
        tie_margin: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.reference, self.prompts, self.sample = reference, prompts, sample
        self.referee, self.reward = referee, reward
        self.tie_margin, self.seed = tie_margin, seed
        replies = sample(reference).replies
        self.sft_text = measure_text(replies)
        self.sft_referee = referee.score(prompts, replies)
        self.sft_reward = reward.score(prompts, replies) if reward is not None else []

    def __call__(self, policy: PreTrainedModel) -> SelectionMetrics:
        """Sample, judge and compare one checkpoint."""
        sampled = self.sample(policy)
        text = measure_text(sampled.replies)
        scores = self.referee.score(self.prompts, sampled.replies)
        margin = tie_margin_of(self.referee, self.tie_margin, self.sft_referee)
        versus = compare(scores, self.sft_referee, margin, 500, self.seed)
        gap = None
        if self.reward is not None:
            reward_gain = _standardised_gain(self.reward.score(self.prompts, sampled.replies), self.sft_reward)
            gap = reward_gain - _standardised_gain(scores, self.sft_referee)
        return SelectionMetrics(
            win_rate=versus.win_rate,
            win_rate_low95=versus.win_rate_low95,
            win_rate_high95=versus.win_rate_high95,
            kl=measure_drift(sampled, self.reference).kl,
            length=text.length,
            length_ratio=text.length / max(self.sft_text.length, 1e-9),
            repetition=text.repetition,
            repetition_increase=text.repetition - self.sft_text.repetition,
            missing_eos=text.missing_eos,
            special_tokens=text.special_tokens,
            referee_gap=gap,
        )


def _standardised_gain(scores: Sequence[float], baseline: Sequence[float]) -> float:
    """Mean gain over the baseline in the baseline's standard deviations."""
    spread = float(np.std(baseline))
    return (float(np.mean(scores)) - float(np.mean(baseline))) / (spread if spread > 0 else 1.0)

"""Which checkpoint becomes the policy: the referee's win rate against SFT under limits, never the reward.

"Best" by the reward that was optimised is the very error the paper's title names (algorithms.md §9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from transformers import PreTrainedModel

from rlhf_core.config.ppo import SelectionConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparison import compare
from rlhf_core.evaluation.model_judge import Judge
from rlhf_core.evaluation.replies import Drift, Sampled, measure_drift
from rlhf_core.evaluation.text_metrics import describe

Sampler = Callable[[PreTrainedModel], Sampled]


@dataclass(frozen=True)
class Candidate:
    """One checkpoint's figures on the fixed validation prompts; ``repetition_increase`` is over SFT's."""

    iteration: int
    win_rate: float
    kl: float
    length_ratio: float
    repetition_increase: float

    def broken_limits(self, limits: SelectionConfig) -> list[str]:
        """The limits that this checkpoint breaks, in words; empty when it is admissible. NaN breaks every limit."""
        checks = {
            f"KL {self.kl:.2f} > {limits.max_kl:g}": self.kl <= limits.max_kl,
            f"length {self.length_ratio:.2f} times SFT's > {limits.max_length_ratio:g}": (
                self.length_ratio <= limits.max_length_ratio
            ),
            f"repetition +{self.repetition_increase:.3f} > +{limits.max_repetition_increase:g}": (
                self.repetition_increase <= limits.max_repetition_increase
            ),
        }
        return [text for text, holds in checks.items() if not holds]


@dataclass(frozen=True)
class Choice:
    """The chosen checkpoint, whether it keeps all limits, and why it was taken."""

    candidate: Candidate
    admissible: bool
    reason: str

    def as_dict(self) -> dict[str, object]:
        """Plain JSON for the PPO metrics."""
        return {**asdict(self.candidate), "admissible": self.admissible, "reason": self.reason}


def choose(candidates: Sequence[Candidate], limits: SelectionConfig) -> Choice:
    """The highest referee win rate among admissible checkpoints; equal ones by lower KL, then by being earlier.

    When none is admissible the one nearest to the reference is taken and marked so: a run must end with some policy,
    and the gate decides whether it is good enough. Raises :class:`DataError` when there is nothing to choose from.
    """
    if not candidates:
        raise DataError("no checkpoint was evaluated; set ppo.selection.every to at most ppo.iterations")
    admissible = [c for c in candidates if not c.broken_limits(limits)]
    if not admissible:
        nearest = min(candidates, key=lambda c: (not np.isfinite(c.kl), c.kl, c.iteration))
        broken = "; ".join(nearest.broken_limits(limits))
        return Choice(nearest, False, f"no checkpoint keeps all limits ({broken}); lowest KL taken")
    best = min(admissible, key=lambda c: (-c.win_rate, c.kl, c.iteration))
    reason = f"highest referee win rate {best.win_rate:.3f} of {len(admissible)} admissible checkpoints"
    return Choice(best, True, reason)


class SelectionEvaluator:
    """Scores a policy on fixed prompts against SFT's replies, which are sampled and judged once.

    ``sample`` draws replies of a model to ``prompts`` without filters at temperature 1, with the same random numbers
    for every model, so that the figures are a function of the weights alone and a resumed run repeats them exactly.
    """

    def __init__(
        self,
        reference: PreTrainedModel,
        prompts: Sequence[Sequence[Message]],
        referee: Judge,
        sample: Sampler,
        reward: Judge | None = None,
        tie_margin: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.reference, self.prompts, self.sample = reference, prompts, sample
        self.tie_margin, self.seed = tie_margin, seed
        self.judges = {"referee": referee} | ({"reward": reward} if reward is not None else {})
        sampled = sample(reference)
        self.baseline_text = describe(sampled.replies)
        self.baseline = {name: judge.score(prompts, sampled.replies) for name, judge in self.judges.items()}

    def __call__(self, policy: PreTrainedModel) -> dict[str, float]:
        """``win_rate`` (with ``_low95`` and ``_high95``) by the referee, ``kl`` in nats per sequence, ``length_ratio``,
        ``repetition``, ``repetition_increase``, ``missing_eos``, and with a reward model ``referee_gap``: by how many
        standard deviations of SFT replies the reward's progress exceeds the referee's."""
        sampled = self.sample(policy)
        drift: Drift = measure_drift(sampled, self.reference)
        text = describe(sampled.replies)
        scores = {name: judge.score(self.prompts, sampled.replies) for name, judge in self.judges.items()}
        versus = compare(scores["referee"], self.baseline["referee"], self.tie_margin, 500, self.seed)
        found = {
            "win_rate": versus.win_rate,
            "win_rate_low95": versus.win_rate_low95,
            "win_rate_high95": versus.win_rate_high95,
            "kl": drift.kl,
            "length": text["length"],
            "length_ratio": text["length"] / max(self.baseline_text["length"], 1e-9),
            "repetition": text["repetition"],
            "repetition_increase": text["repetition"] - self.baseline_text["repetition"],
            "missing_eos": text["missing_eos"],
        }
        progress = {name: _progress(values, self.baseline[name]) for name, values in scores.items()}
        if "reward" in progress:
            found["referee_gap"] = progress["reward"] - progress["referee"]
        return found


def candidate(iteration: int, figures: dict[str, float]) -> Candidate:
    """The candidate that :class:`SelectionEvaluator`'s figures describe."""
    return Candidate(
        iteration=iteration,
        win_rate=figures["win_rate"],
        kl=figures["kl"],
        length_ratio=figures["length_ratio"],
        repetition_increase=figures["repetition_increase"],
    )


def _progress(scores: Sequence[float], baseline: Sequence[float]) -> float:
    """Mean gain over the baseline in the baseline's standard deviations."""
    spread = float(np.std(baseline))
    return (float(np.mean(scores)) - float(np.mean(baseline))) / (spread if spread > 0 else 1.0)

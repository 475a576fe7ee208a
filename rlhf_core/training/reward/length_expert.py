"""Length expert: what reply lengths alone say of a preference, fitted before the reward model and dropped after it.

During training the log-odds of the expert are added to the reward model's margin (a product of experts: Clark et al.,
2019, "Don't Take the Easy Way Out", for known biases of any kind). Gradients then teach what lengths do not explain.
Unlike length-balanced sampling it uses every pair. Chen et al., 2024 ("ODIN") train such a length head jointly with the
reward and drop it likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LengthExpert:
    """Log-odds that the first of two replies is preferred, from their lengths in tokens.

    Attributes:
        scale: Difference in tokens at which ``tanh`` begins to flatten.
        weights: Of the logarithm of the ratio of lengths, and of ``tanh(difference / scale)``.
    """

    scale: float
    weights: tuple[float, float]

    def log_odds(self, first: Lengths, second: Lengths) -> npt.NDArray[np.float64]:
        """(B,), (B,) -> (B,); swapping the replies changes the sign."""
        values: npt.NDArray[np.float64] = _features(first, second, self.scale) @ np.array(self.weights)
        return values


def fitted_length_expert(chosen: Lengths, rejected: Lengths) -> LengthExpert:
    """Fit the expert by logistic regression to the lengths of the chosen and rejected replies of the training pairs."""
    from sklearn.linear_model import LogisticRegression

    scale = max(1.0, float(np.median(np.abs(chosen - rejected))))
    features = _features(chosen, rejected, scale)
    both_orders = np.concatenate([features, -features])
    preferred = np.repeat([1, 0], len(features))
    regression = LogisticRegression(fit_intercept=False).fit(both_orders, preferred)
    log_ratio, difference = regression.coef_[0].tolist()
    return LengthExpert(scale, (log_ratio, difference))


@dataclass(frozen=True)
class LengthExperts:
    """A length expert for each category that has one of its own, and one for the pairs of all others.

    Length says one thing of a preference in one data set and another in the next: an expert for both would explain
    away the wrong part of each.
    """

    of_category: Mapping[str, LengthExpert]
    others: LengthExpert

    def log_odds(self, first: Lengths, second: Lengths, categories: Sequence[str]) -> npt.NDArray[np.float64]:
        """(B,), (B,), (B,) -> (B,): what each pair's expert says."""
        odds = self.others.log_odds(first, second)
        for name, expert in self.of_category.items():
            rows = np.array([category == name for category in categories])
            odds[rows] = expert.log_odds(first[rows], second[rows])
        return odds


def fitted_length_experts(
    chosen: Lengths, rejected: Lengths, categories: Sequence[str], apart: Mapping[str, float]
) -> LengthExperts:
    """Fit the experts to training pairs: of each category in ``apart``, and of all others together."""
    names = np.array(categories)
    rows = {name: names == name for name in apart}
    others = ~np.any(list(rows.values()), axis=0) if rows else np.ones(len(names), dtype=bool)
    fitted = {name: fitted_length_expert(chosen[k], rejected[k]) for name, k in rows.items()}
    return LengthExperts(fitted, fitted_length_expert(chosen[others], rejected[others]))


def _features(first: Lengths, second: Lengths, scale: float) -> npt.NDArray[np.float64]:
    return np.stack([np.log(first / second), np.tanh((first - second) / scale)], axis=1)

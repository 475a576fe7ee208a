"""Length expert: what reply lengths alone say of a preference, fitted before the reward model and dropped after it.

During training the log-odds of the expert are added to the reward model's margin (a product of experts: Clark et al.,
2019, "Don't Take the Easy Way Out", for known biases of any kind). Gradients then teach what lengths do not explain.
Unlike length-balanced sampling it uses every pair. Chen et al., 2024 ("ODIN") train such a length head jointly with the
reward and drop it likewise.
"""

from __future__ import annotations

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


def _features(first: Lengths, second: Lengths, scale: float) -> npt.NDArray[np.float64]:
    return np.stack([np.log(first / second), np.tanh((first - second) / scale)], axis=1)

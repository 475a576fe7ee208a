"""What is fitted before a reward model is trained.

That is its head on frozen features, and what lengths alone say.

Linear probe: a head that starts at random pulls the features under it out of shape while it learns;
from a fitted one, fine-tuning changes them little where they serve already (Kumar et al., 2022,
"Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution": LP-FT). With few
pairs the probe alone is most of a reward model.

Length expert: during training its log-odds are added to the reward model's margin (a product of
experts: Clark et al., 2019, "Don't Take the Easy Way Out", for known biases of any kind). Gradients
then teach what lengths do not explain. Unlike length-balanced sampling it uses every pair. Chen et
al., 2024 ("ODIN") train such a length head jointly with the reward and drop it likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_core.data.batches import TokenisedPair, pair_sequences
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.examples import ReplyBatch, values_of_sequences

FEATURE_TOKENS, FEATURE_ROWS = 8192, 64
MOST_ITERATIONS = 500

Floats = npt.NDArray[np.float64]


def fit_linear_probe(
    model: ScalarModel,
    pairs: Sequence[TokenisedPair],
    offsets: Floats,
    strength: float,
    pad: int,
    name: str,
) -> None:
    """Fit the head of ``model`` to preferences by logistic regression on frozen features.

    Args:
        pairs: Training pairs (B).
        offsets: Added to the margin of each pair (B,), such as minus its target margin.
        strength: Of the L2 penalty on weights of features that are scaled to a standard deviation
            of one.
        pad: Id of the padding token.
        name: Names the model where its progress is shown.
    """
    chosen, rejected = pooled_features(model, pairs, pad, f"{name}, linear probe")
    differences = chosen - rejected
    # A feature that is the same in all pairs says nothing of any.
    mean_squares = (differences**2).mean(axis=0)
    scale = np.sqrt(mean_squares) + 1e-6
    weights = logistic_weights(differences / scale, offsets, strength) / scale
    head = model.model.get_submodule("score").get_parameter("weight")
    with torch.no_grad():
        head.copy_(torch.from_numpy(weights).unsqueeze(0))


def logistic_weights(differences: Floats, offsets: Floats, strength: float) -> Floats:
    """Minimise ``mean(softplus(-(D w + offsets))) + strength / 2 * |w|^2``.

    Shapes: (B, H), (B,) -> (H,).
    """
    from scipy.optimize import minimize

    def loss(weights: Floats) -> tuple[float, Floats]:
        margins = differences @ weights + offsets
        wrong = np.exp(-np.logaddexp(0.0, margins))
        pulls = differences * wrong[:, np.newaxis]
        gradient = -pulls.mean(axis=0) + strength * weights
        ranking = np.logaddexp(0.0, -margins).mean()
        penalty = strength * (weights @ weights) / 2
        return float(ranking + penalty), gradient

    start = np.zeros(differences.shape[1])
    options = {"maxiter": MOST_ITERATIONS}
    fit = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    weights: Floats = fit.x
    return weights


def rows_to_pool(longest: int) -> int:
    """How many sequences of ``longest`` tokens are read at once."""
    return max(1, min(FEATURE_ROWS, FEATURE_TOKENS // longest))


def pooled_features(
    model: ScalarModel, pairs: Sequence[TokenisedPair], pad: int, name: str
) -> tuple[Floats, Floats]:
    """What the head reads of the chosen and of the rejected replies, twice (B, H).

    Ranks share the sequences.
    """
    model.eval()
    sequences = pair_sequences(pairs)
    size = rows_to_pool(max(sequences.lengths))

    def pooled(batch: ReplyBatch) -> Tensor:
        hidden = model.hidden(batch.input_ids, batch.attention_mask)
        return model.pool(hidden, batch.attention_mask, batch.reply_mask)

    device = next(model.parameters()).device
    of_sequence: Floats = values_of_sequences(
        sequences.distinct, pooled, size, pad, device, name
    ).numpy()
    return of_sequence[sequences.chosen], of_sequence[sequences.rejected]


Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LengthExpert:
    """Log-odds that the first of two replies is preferred, from their lengths in tokens.

    Attributes:
        scale: Difference in tokens at which ``tanh`` begins to flatten.
        weights: Of the logarithm of the ratio of lengths, and of ``tanh(difference / scale)`` (2,).
    """

    scale: float
    weights: Floats

    @classmethod
    def fitted(cls, chosen: Lengths, rejected: Lengths) -> LengthExpert:
        """Fit it by logistic regression to the lengths of training pairs' replies."""
        from sklearn.linear_model import LogisticRegression

        typical = np.median(np.abs(chosen - rejected))
        scale = max(1.0, float(typical))
        features = _features(chosen, rejected, scale)
        both_orders = np.concatenate([features, -features])
        preferred = np.repeat([1, 0], len(features))
        fit = LogisticRegression(fit_intercept=False).fit(both_orders, preferred)
        return cls(scale, fit.coef_[0])

    def log_odds(self, first: Lengths, second: Lengths) -> Floats:
        """(B,), (B,) -> (B,); swapping the replies changes the sign."""
        values: Floats = _features(first, second, self.scale) @ self.weights
        return values


@dataclass(frozen=True)
class LengthExperts:
    """A length expert for each category that has its own, and one for all other pairs.

    Length says one thing of a preference in one data set and another in the next: an expert for
    both would explain away the wrong part of each.
    """

    of_category: Mapping[str, LengthExpert]
    others: LengthExpert

    @classmethod
    def fitted(
        cls,
        chosen: Lengths,
        rejected: Lengths,
        categories: Sequence[str],
        apart: Mapping[str, float],
    ) -> LengthExperts:
        """Fit the experts to training pairs.

        Of each category in ``apart``, and of all others together.
        """
        names = np.array(categories)
        others = ~np.isin(names, list(apart))
        of_category = {}
        for name in apart:
            is_here = names == name
            of_category[name] = LengthExpert.fitted(chosen[is_here], rejected[is_here])
        return cls(of_category, LengthExpert.fitted(chosen[others], rejected[others]))

    def log_odds(self, first: Lengths, second: Lengths, categories: Sequence[str]) -> Floats:
        """(B,), (B,), (B,) -> (B,): what each pair's expert says."""
        odds = self.others.log_odds(first, second)
        names = np.array(categories)
        for name, expert in self.of_category.items():
            is_here = names == name
            odds[is_here] = expert.log_odds(first[is_here], second[is_here])
        return odds


def _features(first: Lengths, second: Lengths, scale: float) -> Floats:
    ratio = np.log(first / second)
    difference = np.tanh((first - second) / scale)
    return np.stack([ratio, difference], axis=1)

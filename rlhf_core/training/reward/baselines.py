"""Baseline of a reward model: a bag of words on the same pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.data.schema import Preference
from rlhf_core.data.text import IDEOGRAPHS
from rlhf_core.training.reward.evaluation import accuracy

WORDS = 5000
MOST_PAIRS = 20000
# An ideograph is a word of its own: without spaces, a whole clause would be one.
TOKEN_PATTERN = rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s]"


def bag_of_words_accuracy(
    train: Sequence[Preference], held_out: Mapping[str, Sequence[Preference]]
) -> dict[str, float]:
    """Accuracy on each held-out split of a logistic regression on word-count differences of the two replies.

    It is trained on at most 20,000 pairs and reads replies alone: it can learn style, but not answers to prompts.
    """
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    pairs = train[:MOST_PAIRS]
    vectorizer = CountVectorizer(max_features=WORDS, token_pattern=TOKEN_PATTERN)
    try:
        vectorizer.fit([text for pair in pairs for text in (pair.chosen, pair.rejected)])
    except ValueError:
        # Replies without any word give the regression no feature.
        return dict.fromkeys(held_out, 0.5)

    def differences(rows: Sequence[Preference]) -> Any:
        """Sparse (pairs, words)."""
        return vectorizer.transform([p.chosen for p in rows]) - vectorizer.transform([p.rejected for p in rows])

    features = differences(pairs)
    # Each pair enters both ways round, so that the labels are balanced and no intercept is needed.
    labels = np.concatenate([np.ones(len(pairs)), np.zeros(len(pairs))])
    model = LogisticRegression(fit_intercept=False, max_iter=1000).fit(vstack([features, -features]), labels)
    return {name: accuracy(model.decision_function(differences(rows))) for name, rows in held_out.items()}

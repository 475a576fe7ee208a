"""Simulated annotators: Bradley–Terry over gold score plus length bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.world import gold


@dataclass(frozen=True)
class AnnotatorConfig:
    """Parameters of the simulated annotators.

    Attributes:
        sharpness: Factor on score differences in the Bradley–Terry model; noise falls as it grows.
        length_bias: Points of gold score that one more word is worth to an annotator.
    """

    sharpness: float
    length_bias: float


def preference_probability(prompt: str, first: str, second: str, config: AnnotatorConfig) -> float:
    """Return P(first ≻ second) = σ(sharpness · (Δgold + length_bias · Δwords)), for two finished replies."""
    gold_difference = gold.score(prompt, first, True) - gold.score(prompt, second, True)
    word_difference = len(first.split()) - len(second.split())
    # σ(x) written as a tanh, which does not overflow for a large sharpness.
    return 0.5 + 0.5 * math.tanh(0.5 * config.sharpness * (gold_difference + config.length_bias * word_difference))

"""Noisy annotators: they feel the gold score, are a little fond of length, and choose by the Bradley–Terry model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.world import gold


@dataclass(frozen=True)
class Temper:
    """How sharply annotators see a difference of gold, and how many points of gold a word is worth to them."""

    sharpness: float
    length_bias: float


def preference_probability(prompt: str, first: str, second: str, temper: Temper) -> float:
    """P(first ≻ second) = σ(sharpness · (Δgold + length_bias · Δwords)), for two finished replies."""
    difference = gold.score(prompt, first, True) - gold.score(prompt, second, True)
    words = len(first.split()) - len(second.split())
    # Halved and through tanh: the same sigmoid, without overflow however sharp the annotators are.
    return 0.5 + 0.5 * math.tanh(0.5 * temper.sharpness * (difference + temper.length_bias * words))

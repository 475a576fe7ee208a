"""How far annotators agree beyond chance: Cohen's kappa for two, Fleiss' kappa for all."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Kappa:
    """Agreement of ``annotators`` on the ``pairs`` that all of them answered.

    ``value`` is 1 for full agreement, 0 for that of chance; None where it is not defined, as for a single choice.
    """

    annotators: tuple[str, ...]
    value: float | None
    pairs: int


def cohen_kappas(choices: Mapping[str, Mapping[str, str]]) -> list[Kappa]:
    """Return Cohen's kappa of every two annotators who have answered a pair in common.

    Args:
        choices: By annotator, the choice on each pair.
    """
    from sklearn.metrics import cohen_kappa_score

    kappas = []
    for first, second in combinations(sorted(choices), 2):
        common = sorted(choices[first].keys() & choices[second].keys())
        if common:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of one choice everywhere, whose kappa is not defined
                value = float(cohen_kappa_score(*([choices[who][pair] for pair in common] for who in (first, second))))
            kappas.append(Kappa((first, second), value if math.isfinite(value) else None, len(common)))
    return kappas


def fleiss_kappa(choices: Mapping[str, Mapping[str, str]]) -> Kappa | None:
    """Return Fleiss' kappa of three or more annotators; None for fewer, or if no pair was answered by all.

    Fleiss, 1971, "Measuring nominal scale agreement among many raters": the share of agreeing pairs of annotators
    beyond that of chance, which is what the choices' shares over all pairs would give.
    """
    if len(choices) < 3:
        return None
    annotators = sorted(choices)
    common = sorted(set.intersection(*(set(choices[who]) for who in annotators)))
    if not common:
        return None
    counts = [Counter(choices[who][pair] for who in annotators) for pair in common]
    raters = len(annotators)
    agreeing = sum(n * (n - 1) for row in counts for n in row.values()) / (len(common) * raters * (raters - 1))
    by_chance = sum((n / (len(common) * raters)) ** 2 for n in sum(counts, Counter()).values())
    value = (agreeing - by_chance) / (1 - by_chance) if by_chance < 1 else None
    return Kappa(tuple(annotators), value, len(common))

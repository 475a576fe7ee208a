"""What a data team asks of preference pairs as a whole: agreement of repeated labels, length bias, balance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from scipy import stats

from rlhf_core.data.text import comparable
from rlhf_core.data.validation.stored_rows import StoredRows


@dataclass(frozen=True)
class LabelAgreement:
    """Labels of pairs that occur more than once, in either order.

    Attributes:
        repeated: Pairs of replies to a prompt with two labels or more.
        contradicted: Those of them that are labelled both ways.
        labels: Labels of repeated pairs.
        with_majority: Those of them that say what most labels of the pair say; half of a tie.
    """

    repeated: int
    contradicted: int
    labels: int
    with_majority: int

    @property
    def share(self) -> float | None:
        """Share of labels that agree with the majority of their pair; None where no pair repeats."""
        return self.with_majority / self.labels if self.labels else None


@dataclass(frozen=True)
class LengthBias:
    """How often the longer reply is preferred, of the pairs that differ in characters, with a 95 % interval."""

    pairs: int
    share: float
    low95: float
    high95: float


def label_agreement(preferences: StoredRows) -> LabelAgreement:
    """Count the labels of every pair among all rows that were read, refused ones too.

    White space and invisible characters do not count. Exact copies, of one margin too, are one label: what repeats a
    row is no second annotator.
    """
    labels: dict[int, list[int]] = {}
    seen: set[int] = set()
    for part in preferences.parts(["prompt", "chosen", "rejected", "margin"]):
        for row in part.to_pylist():
            turns = [(turn["role"], turn["content"] or "") for turn in row["prompt"] or [] if turn]
            copy = hash((*turns, row["chosen"], row["rejected"], row["margin"]))
            if copy in seen:
                continue
            seen.add(copy)
            prompt = tuple((role, comparable(content)) for role, content in turns)
            chosen, rejected = comparable(row["chosen"] or ""), comparable(row["rejected"] or "")
            if chosen != rejected:
                first, second = sorted((chosen, rejected))
                votes = labels.setdefault(hash((prompt, first, second)), [0, 0])
                votes[chosen == second] += 1
    repeated = [votes for votes in labels.values() if sum(votes) > 1]
    return LabelAgreement(
        repeated=len(repeated),
        contradicted=sum(min(votes) > 0 for votes in repeated),
        labels=sum(map(sum, repeated)),
        with_majority=sum(map(max, repeated)),
    )


def length_bias(preferences: StoredRows) -> LengthBias | None:
    """Return the share of pairs whose longer reply is preferred, with Wilson's interval; None without such pairs."""
    unequal = longer = 0
    for part in preferences.parts(["chosen", "rejected"]):
        chosen, rejected = (pc.utf8_length(part.column(name)).to_numpy() for name in ("chosen", "rejected"))
        unequal += int(np.count_nonzero(chosen != rejected))
        longer += int(np.count_nonzero(chosen > rejected))
    if not unequal:
        return None
    test = stats.binomtest(longer, unequal)
    interval = test.proportion_ci(0.95, method="wilson")
    return LengthBias(unequal, float(test.statistic), float(interval.low), float(interval.high))


def pair_metrics(raw: StoredRows, clean: StoredRows) -> dict[str, float]:
    """Return statistics of pairs for ``metrics/data.json``: agreement of ``raw`` rows, bias of ``clean`` ones."""
    agreement, bias = label_agreement(raw), length_bias(clean)
    metrics = {
        "repeated_pairs": float(agreement.repeated),
        "contradicted_pairs": float(agreement.contradicted),
    }
    if agreement.share is not None:
        metrics["label_agreement"] = agreement.share
    if bias is not None:
        metrics |= {
            "longer_preferred_share": bias.share,
            "longer_preferred_low95": bias.low95,
            "longer_preferred_high95": bias.high95,
        }
    return metrics


def category_counts(rows: StoredRows) -> Counter[str]:
    """Return how many rows each category has, the largest first."""
    counts: Counter[str] = Counter()
    for part in rows.parts(["category"]):
        counts.update(part.column("category").to_pylist())
    return Counter(dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def balance(counts: Mapping[str, int]) -> float | None:
    """Return Pielou's evenness: entropy over its maximum, 1 where all are equally frequent; None for fewer than two."""
    if len(counts) < 2:
        return None
    return float(stats.entropy(list(counts.values()))) / math.log(len(counts))

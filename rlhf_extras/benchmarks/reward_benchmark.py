"""Best of n on a benchmark of reward models: does the model score the right reply above all wrong
ones?

Malik et al., 2025, "RewardBench 2: Advancing Reward Model Evaluation". A row has a prompt, one
right reply and three wrong ones, so that guessing gives a quarter. Accuracy is per subset, and the
mean is over subsets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.data.schema import Message
from rlhf_core.data.statistics import cluster_codes, wilson_bounds
from rlhf_core.data.text import HALF_PAIR, is_encodable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.model import Judge, require_finite
from rlhf_core.evaluation.replies import Reply, prompt_of, rows_of_file


@dataclass(frozen=True)
class BenchmarkRow:
    """A prompt with its right and wrong replies."""

    prompt: list[Message]
    chosen: Sequence[str]
    rejected: Sequence[str]
    subset: str

    @property
    def replies(self) -> list[str]:
        """All replies, the right ones first."""
        return [*self.chosen, *self.rejected]


def read_benchmark(path: Path) -> list[BenchmarkRow]:
    """Read a file of the fields ``prompt``, ``chosen``, ``rejected`` (lists of texts) and
    ``subset``.

    A prompt is a text or a list of ``{"role", "content"}``; one reply may stand without a list.

    Raises:
        DataError: The file cannot be read, or a row of it is none of a benchmark; the message names
            the first.
    """
    return [_row(value, where) for where, _, value in rows_of_file(path)]


def _row(value: Mapping[str, Any], where: str) -> BenchmarkRow:
    replies: dict[str, list[str]] = {}
    for name in ("chosen", "rejected"):
        given = value.get(name)
        texts = [given] if isinstance(given, str) else given
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(text, str) for text in texts)
        ):
            raise DataError(f"{where}: {name} is no list of texts")
        if not all(map(is_encodable, texts)):
            raise DataError(f"{where}: {name} {HALF_PAIR}")
        replies[name] = texts
    prompt = prompt_of(value.get("prompt"))
    if prompt is None:
        raise DataError(f"{where}: prompt is neither a text nor a list of messages")
    if not all(is_encodable(turn.content) for turn in prompt):
        raise DataError(f"{where}: prompt {HALF_PAIR}")
    if prompt[-1].role != "user":
        raise DataError(f"{where}: prompt does not end with a user turn")
    return BenchmarkRow(
        prompt, replies["chosen"], replies["rejected"], str(value.get("subset") or "all")
    )


def row_accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> float:
    """Return how right the scores of a row are, in [0, 1].

    With one right reply: 1 if it scores highest, 1/k if it shares the highest score with k - 1
    others, else 0. With
    several: 1 if each scores above every wrong one, else 0. (The benchmark's own number for its
    subset of several right replies also weighs by how much; it is not computed here.)
    """
    if len(chosen) > 1:
        return float(min(chosen) > max(rejected))
    best = max(*chosen, *rejected)
    return 1 / [*chosen, *rejected].count(best) if chosen[0] == best else 0.0


def run_benchmark(judge: Judge, rows: Sequence[BenchmarkRow]) -> dict[str, Any]:
    """Score every reply of every row.

    Returns:
        ``mean``, the unweighted mean accuracy of the ``subsets``, and for each of these how many
        ``rows`` and different prompts (``clusters``) it has, ``accuracy`` with 95 % bounds over
        these (Wilson), and that of guessing, ``chance``.

    Raises:
        DataError: A score is not finite.
    """
    prompts, replies = [], []
    for row in rows:
        for text in row.replies:
            prompts.append(row.prompt)
            replies.append(Reply(text, True))
    scored = judge.score(prompts, replies)
    require_finite(scored)
    scores = iter(scored)
    accuracies, chances, asked = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows:
        chosen = [next(scores) for _ in row.chosen]
        rejected = [next(scores) for _ in row.rejected]
        accuracies[row.subset].append(row_accuracy(chosen, rejected))
        turns = tuple((turn.role, turn.content) for turn in row.prompt)
        asked[row.subset].append(turns)
        # Of all orders of the replies, the share in which the right ones come first.
        chances[row.subset].append(1 / math.comb(len(row.replies), len(row.chosen)))
    subsets = {}
    for subset in sorted(accuracies):
        values = np.array(accuracies[subset])
        clusters = cluster_codes(asked[subset])
        count = int(clusters.max()) + 1
        low, high = wilson_bounds(float(values.mean()), count)
        subsets[subset] = {
            "rows": len(values),
            "clusters": count,
            "accuracy": float(values.mean()),
            "accuracy_low95": low,
            "accuracy_high95": high,
            "chance": float(np.mean(chances[subset])),
        }
    return {
        "mean": float(np.mean([subset["accuracy"] for subset in subsets.values()])),
        "subsets": subsets,
    }


def as_text(result: Mapping[str, Any]) -> str:
    """Return a table with a line for each subset."""
    width = max(len("subset"), *map(len, result["subsets"]))
    lines = [f"{'subset':<{width}}  rows  prompts  accuracy  95 %          chance"]
    for name, subset in result["subsets"].items():
        bounds = f"{subset['accuracy_low95']:.2f} to {subset['accuracy_high95']:.2f}"
        counts = f"{subset['rows']:>4}  {subset['clusters']:>7}"
        lines.append(
            f"{name:<{width}}  {counts}  {subset['accuracy']:>8.3f}  {bounds:<12}  {subset['chance']:.2f}"
        )
    return "\n".join([*lines, f"mean over subsets: {result['mean']:.3f}"])

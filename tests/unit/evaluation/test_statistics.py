"""The bounds keep what they promise where replies to one question hang together: coverage at a design effect of two."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.data.schema import Message, Prompt
from rlhf_core.evaluation import statistics
from rlhf_core.evaluation.statistics import bootstrap_bounds, cluster_codes, clusters_of, share_difference_high

CLUSTERS, REPLIES, RUNS = 150, 4, 3000
CLUSTER = np.repeat(np.arange(CLUSTERS), REPLIES)


def hanging_together(runs: int, effect: float = 2.0) -> np.ndarray:
    """Standard normal replies, (runs, clusters * replies), of which ``effect`` is the design effect of the mean."""
    share = (effect - 1) / (REPLIES - 1)
    rng = np.random.default_rng(4)
    common = rng.normal(size=(runs, CLUSTERS, 1)) * np.sqrt(share)
    return (common + rng.normal(size=(runs, CLUSTERS, REPLIES)) * np.sqrt(1 - share)).reshape(runs, -1)


def test_the_interval_covers_what_it_says_and_one_over_rows_does_not() -> None:
    won = (hanging_together(RUNS) > 0).astype(float)
    low, high = bootstrap_bounds(won, 1000, 0, CLUSTER)
    below, above = (low > 0.5).mean(), (high < 0.5).mean()
    assert below == pytest.approx(0.025, abs=0.01)
    assert above == pytest.approx(0.025, abs=0.01)
    naive, _ = bootstrap_bounds(won[:1000], 400, 0)
    assert (naive > 0.5).mean() > 0.045


def test_the_bound_of_a_mean_covers_what_it_says() -> None:
    values = hanging_together(RUNS)
    missed = np.mean([statistics.mean_high(row, CLUSTER) < 0 for row in values])
    assert missed == pytest.approx(0.05, abs=0.01)


def test_the_bound_of_a_share_covers_what_it_says() -> None:
    lost, gained = 0.10, 0.05
    # One uniform number per reply decides; its normal scores hang together.
    from scipy.stats import norm

    position = norm.cdf(hanging_together(2000))
    rows = ((row < lost).astype(float) - (row > 1 - gained) for row in position)
    missed = np.mean(
        [share_difference_high(np.maximum(row, 0), np.maximum(-row, 0), CLUSTER) < lost - gained for row in rows]
    )
    assert missed == pytest.approx(0.05, abs=0.012)


def test_rare_losses_are_bounded_by_prompts_and_not_by_replies() -> None:
    none = np.zeros(CLUSTERS * REPLIES)
    assert share_difference_high(none, none, CLUSTER) == pytest.approx(1.645**2 / (CLUSTERS + 1.645**2), rel=1e-3)
    rng = np.random.default_rng(2)
    missed = []
    for _ in range(600):
        # In a hundredth of the prompts every reply is lost.
        lost = np.repeat(rng.random(CLUSTERS) < 0.01, REPLIES).astype(float)
        missed.append(share_difference_high(lost, none, CLUSTER) < 0.01)
    assert np.mean(missed) <= 0.06


def test_the_sign_test_of_clusters_keeps_its_level() -> None:
    won = (hanging_together(RUNS) > 0).reshape(RUNS, CLUSTERS, REPLIES).mean(axis=2)
    counts = [(int((row > 0.5).sum()), int((row == 0.5).sum()), int((row < 0.5).sum())) for row in won]
    known = {count: statistics.sign_test(*count) for count in set(counts)}
    rejected = np.mean([known[count] <= 0.025 for count in counts])
    assert 0.01 <= rejected <= 0.035


def test_a_cluster_is_a_content_of_the_world_and_elsewhere_a_group() -> None:
    rows = [
        ("world", "fact|lamp color|form 0"),
        ("world", "fact|lamp color|form 7"),
        ("world", "fact|lamp size|form 0"),
        ("a.jsonl", "hello|form 0"),
        ("a.jsonl", "hello|form 1"),
        ("a.jsonl", "hello|form 1"),
    ]
    prompts = [Prompt(str(i), [Message("user", "?")], "c", source, group) for i, (source, group) in enumerate(rows)]
    assert clusters_of(prompts).tolist() == [0, 0, 1, 2, 3, 3]
    assert clusters_of(prompts[:3], 2).tolist() == [0, 0, 0, 0, 1, 1]
    assert cluster_codes(["b", "a", "b"]).tolist() == [0, 1, 0]

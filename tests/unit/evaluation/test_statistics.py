"""Bounds keep what they promise where replies hang together, repeated attempts their budget of
errors, and gates let an equal policy pass and stop a harmful one, at the sizes and margins that the
profiles set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.statistics import cluster_codes, clusters_of, wilson_bounds
from rlhf_core.errors import DataError
from rlhf_core.evaluation import statistics
from rlhf_core.evaluation.losses import (
    ERRORS_PER_MARGIN,
    MarginPower,
    PairedLoss,
    describe_power,
    fall,
    power_of,
    rise,
    share_loss,
)
from rlhf_core.evaluation.statistics import (
    bootstrap_bounds,
    level_of_attempt,
    share_difference_high,
    sign_test,
)

CLUSTERS, REPLIES, RUNS = 150, 4, 3000
CLUSTER = np.repeat(np.arange(CLUSTERS), REPLIES)


def hanging_together(runs: int, effect: float = 2.0) -> np.ndarray:
    """Standard normal replies, (runs, clusters * replies), of which ``effect`` is the design effect
    of the mean.
    """
    share = (effect - 1) / (REPLIES - 1)
    rng = np.random.default_rng(4)
    common = rng.normal(size=(runs, CLUSTERS, 1)) * np.sqrt(share)
    return (common + rng.normal(size=(runs, CLUSTERS, REPLIES)) * np.sqrt(1 - share)).reshape(
        runs, -1
    )


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
        [
            share_difference_high(np.maximum(row, 0), np.maximum(-row, 0), CLUSTER) < lost - gained
            for row in rows
        ]
    )
    assert missed == pytest.approx(0.05, abs=0.012)


def test_a_percentile_is_widened_by_the_number_of_clusters_by_hand() -> None:
    # sqrt(5 / 4) · t(.025, 4) = 1.118034 · -2.776445 = -3.104160; the normal distribution below it:
    # 0.00095410
    grid = np.linspace(0, 1, 1_000_001)
    assert statistics.percentile(grid, 0.025, 5) == pytest.approx(0.00095410, abs=1e-7)
    assert statistics.percentile(grid, 0.975, 5) == pytest.approx(1 - 0.00095410, abs=1e-7)


def test_a_mean_of_unequal_clusters_by_hand() -> None:
    # Deviations from 0.5 add up to -0.5 and 0.5: sqrt((0.25 + 0.25) · 2 / 1) / 4; t(.95, 1) =
    # 6.313752
    values, clusters = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 0, 1])
    assert statistics.standard_error(values, clusters) == (pytest.approx(0.25), 2)
    assert statistics.mean_high(values, clusters) == pytest.approx(0.5 + 6.313752 * 0.25, abs=1e-6)


@pytest.mark.parametrize("replies", [1, 4])
def test_one_lost_question_of_forty_is_bounded_by_wilson_however_many_replies_it_has(
    replies: int,
) -> None:
    # p = 1/40, z = 1.644854: (p + z²/80 + z · sqrt(p (1 - p) / 40 + z² / 6400)) / (1 + z² / 40)
    lost = np.repeat(np.arange(40) == 0, replies).astype(float)
    clusters = np.repeat(np.arange(40), replies)
    assert statistics.share_difference_high(lost, 0 * lost, clusters) == pytest.approx(
        0.104588, abs=1e-5
    )


def test_rare_losses_are_bounded_by_prompts_and_not_by_replies() -> None:
    none = np.zeros(CLUSTERS * REPLIES)
    assert share_difference_high(none, none, CLUSTER) == pytest.approx(
        1.645**2 / (CLUSTERS + 1.645**2), rel=1e-3
    )
    rng = np.random.default_rng(2)
    missed = []
    for _ in range(600):
        # In a hundredth of the prompts every reply is lost.
        lost = np.repeat(rng.random(CLUSTERS) < 0.01, REPLIES).astype(float)
        missed.append(share_difference_high(lost, none, CLUSTER) < 0.01)
    assert np.mean(missed) <= 0.06


def test_the_sign_test_of_clusters_keeps_its_level() -> None:
    won = (hanging_together(RUNS) > 0).reshape(RUNS, CLUSTERS, REPLIES).mean(axis=2)
    counts = [
        (int((row > 0.5).sum()), int((row == 0.5).sum()), int((row < 0.5).sum())) for row in won
    ]
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
    prompts = [
        Prompt(str(i), [Message("user", "?")], "c", source, group)
        for i, (source, group) in enumerate(rows)
    ]
    assert clusters_of(prompts).tolist() == [0, 0, 1, 2, 3, 3]
    assert clusters_of(prompts[:3], 2).tolist() == [0, 0, 0, 0, 1, 1]
    assert cluster_codes(["b", "a", "b"]).tolist() == [0, 1, 0]


PROMPTS, ATTEMPTS, WORLDS, BUDGET = 320, 30, 2000, 0.05


@pytest.mark.parametrize(
    ("wins", "ties", "losses", "bar", "expected"),
    [
        (5, 0, 0, 0.5, 1 / 32),
        (5, 40, 0, 0.5, 1 / 32),  # ties are set aside
        (4, 0, 1, 0.5, 6 / 32),  # C(5, 4) + C(5, 5)
        (0, 9, 0, 0.5, 1.0),
        (0, 0, 3, 0.5, 1.0),
        (3, 0, 0, 0.8, 0.8**3),
        # At a win rate of 0.75 with 4 ties of 12, 9 - 2 = 7 of the 8 decided prompts are won.
        (8, 4, 0, 0.75, (7 / 8) ** 8),
        (8, 4, 0, 0.95, 1.0),  # with 4 ties the win rate is 10 / 12 at most
        (2, 8, 0, 0.3, 0.0),  # with 8 ties the win rate is 4 / 10 at least
        (0, 8, 2, 0.3, 1.0),
    ],
)
def test_by_hand(wins: int, ties: int, losses: int, bar: float, expected: float) -> None:
    assert sign_test(wins, ties, losses, bar) == pytest.approx(expected)


def test_the_levels_by_hand() -> None:
    assert [level_of_attempt(0.06, attempt) for attempt in (1, 2, 3)] == pytest.approx(
        [0.03, 0.01, 0.005]
    )
    assert sum(level_of_attempt(BUDGET, attempt) for attempt in range(1, 31)) == pytest.approx(
        BUDGET * 30 / 31
    )
    with pytest.raises(ValueError, match="counted from 1"):
        level_of_attempt(0.05, 0)


@given(st.floats(0.001, 1), st.integers(1, 300))
def test_the_budget_is_never_exceeded(budget: float, attempts: int) -> None:
    levels = [level_of_attempt(budget, attempt) for attempt in range(1, attempts + 1)]
    assert sum(levels) < budget and levels == sorted(levels, reverse=True)


def test_false_promotions_over_thirty_attempts_stay_within_the_budget() -> None:
    """Challengers that are exactly as good as the champion, all tried on the same prompts.

    Prompts favour challengers or the champion, half of them each in the long run: what the drawn
    prompts favour by luck every attempt profits from, so attempts depend on one another.
    """
    random = np.random.default_rng(1)
    favoured = random.binomial(PROMPTS, 0.5, size=(WORLDS, 1))
    shape = (WORLDS, ATTEMPTS)
    wins = random.binomial(favoured, 0.7, size=shape) + random.binomial(
        PROMPTS - favoured, 0.3, size=shape
    )
    p_of_wins = np.array([sign_test(count, 0, PROMPTS - count) for count in range(PROMPTS + 1)])
    p_values = p_of_wins[wins]
    levels = np.array([level_of_attempt(BUDGET, attempt) for attempt in range(1, ATTEMPTS + 1)])
    promoted_without_budget = (p_values <= BUDGET / 2).any(axis=1).mean()
    promoted = (p_values <= levels).any(axis=1).mean()
    assert promoted_without_budget > 0.2
    assert 0.01 < promoted <= BUDGET
    assert p_of_wins[200] == pytest.approx(stats.binom.sf(199, PROMPTS, 0.5))


@pytest.mark.parametrize(("sets", "within_budget"), [(1, False), (8, True)])
def test_prompts_that_challengers_are_made_for_break_the_budget_or_rotate(
    sets: int, within_budget: bool
) -> None:
    """Challengers no better than the champion, but each time better by 4 % on prompts that were
    played on before.
    """
    random = np.random.default_rng(2)
    promoted = np.zeros(WORLDS, dtype=bool)
    for attempt in range(1, 9):
        played_before = (attempt - 1) // sets
        wins = random.binomial(PROMPTS, 0.5 + 0.04 * played_before, size=WORLDS)
        threshold = stats.binom.isf(level_of_attempt(BUDGET, attempt), PROMPTS, 0.5)
        promoted |= wins > threshold
    assert (promoted.mean() <= BUDGET) == within_budget


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    # Wilson, 1927, by hand: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), z = 1.959964.
    [
        (8, 10, 0.490162, 0.943318),
        (5, 10, 0.236593, 0.763407),
        (12, 12, 0.757506, 1.0),
        (0, 12, 0.0, 0.242494),
    ],
)
def test_wilson_bounds(wins: int, n: int, low: float, high: float) -> None:
    assert wilson_bounds(wins / n, n) == pytest.approx((low, high), abs=1e-5)


EVALUATIONS = 120
# By quantity: margin, questions, replies to each (profiles/smollm2-135m.yaml), and what SFT has of
# it.
REPETITION, ENDS, BENIGN, ODDS = (0.012, 250, 4), (0.1, 250, 4), (0.05, 202, 24), (0.5, 202, 1)


def losses(worse_by: float, rng: np.random.Generator) -> dict[str, tuple[float, PairedLoss]]:
    """One evaluation of a policy that is worse than SFT by so many margins, questions being of
    unequal difficulty.
    """

    def asked(size: tuple[float, int, int]) -> np.ndarray:
        return np.repeat(np.arange(size[1]), size[2])

    def kept(size: tuple[float, int, int], mean: float, strength: float) -> PairedLoss:
        of_prompt = rng.beta(mean * strength, (1 - mean) * strength, size[1])[asked(size)]
        lost = np.clip(of_prompt - worse_by * size[0] * of_prompt / mean, 0, 1)
        return share_loss(
            rng.random(len(lost)) < of_prompt, rng.random(len(lost)) < lost, asked(size)
        )

    level = rng.gamma(1.0, 0.03, REPETITION[1])[asked(REPETITION)]
    old, new = (level + rng.gamma(0.5, 0.04, len(level)) for _ in range(2))
    odds = rng.normal(1.0, 2.0, ODDS[1])
    moved = odds - worse_by * ODDS[0] + rng.normal(0, 1.0, ODDS[1])
    return {
        "repetition": (REPETITION[0], rise(old, new + worse_by * REPETITION[0], asked(REPETITION))),
        "missing_ends": (ENDS[0], kept(ENDS, 0.35, 3.0)),
        "safety.answers_benign": (BENIGN[0], kept(BENIGN, 0.95, 4.0)),
        "safety.refusal_log_odds": (ODDS[0], fall(odds, moved)),
    }


def shares_passed(worse_by: float) -> dict[str, float]:
    rng = np.random.default_rng(8)
    passed: dict[str, list[bool]] = {}
    for _ in range(EVALUATIONS):
        found = losses(worse_by, rng)
        held = {
            name: loss.loss_high95 is not None and loss.loss_high95 < m
            for name, (m, loss) in found.items()
        }
        for name, holds in [*held.items(), ("all", all(held.values()))]:
            passed.setdefault(name, []).append(holds)
    return {name: float(np.mean(values)) for name, values in passed.items()}


def test_equal_and_better_policies_pass_and_each_harm_is_stopped() -> None:
    # With 120 runs two standard errors are .04.
    assert shares_passed(0.0)["all"] >= 0.91
    assert shares_passed(-0.3)["all"] >= 0.96
    at_margin = shares_passed(1.0)
    assert max(share for name, share in at_margin.items() if name != "all") <= 0.10, at_margin
    assert max(shares_passed(2.0).values()) <= 0.02


def written(folder: Path, **of_repetition: float) -> Path:
    condition = "{metric: repetition, worse_by_less_than: 0.02, why: w}"
    other = "{metric: safety.answers_benign, worse_by_less_than: 0.05, why: w}"
    (folder / "params.yaml").write_text(f"gates: {{policy: [{condition}, {other}]}}\n")
    (folder / "metrics").mkdir()
    loss = {
        "baseline": 0.1,
        "candidate": 0.1,
        "loss": 0.0,
        "loss_high95": 0.01,
        "replies": 400,
        "clusters": 100,
    }
    metrics = {"losses": {"repetition": loss | of_repetition}}
    (folder / "metrics/evaluation.json").write_text(json.dumps(metrics))
    return folder


def test_the_power_of_a_margin_says_how_many_questions_would_do(tmp_path: Path) -> None:
    gate, benign, promotion = (
        row for row in power_of(written(tmp_path)) if isinstance(row, MarginPower)
    )
    error = 0.01 / 1.6449
    assert gate.errors == pytest.approx(0.02 / error, rel=1e-3) and not gate.suffices
    assert gate.clusters_needed == pytest.approx(
        100 * (ERRORS_PER_MARGIN * error / 0.02) ** 2, abs=1
    )
    assert promotion.setting == "registry.non_inferiority.repetition"
    assert benign.loss is None and not benign.suffices
    text = describe_power([gate, benign, promotion])
    assert f"{gate.clusters_needed} questions would do" in text and "not measured" in text


def test_a_margin_that_can_be_shown(tmp_path: Path) -> None:
    gate = power_of(written(tmp_path, loss_high95=0.005))[0]
    assert gate.suffices and "an equal policy passes" in describe_power([gate])


def test_the_power_of_a_win_rate_by_hand(tmp_path: Path) -> None:
    names = (
        "comparison.judge.win_rate_low95",
        "comparison.judge.lc_win_rate_low95",
        "comparison.gold.win_rate_low95",
    )
    conditions = [{"metric": name, "at_least": 0.5, "why": "w"} for name in names]
    (tmp_path / "params.yaml").write_text(json.dumps({"gates": {"policy": conditions}}))
    (tmp_path / "metrics").mkdir()
    judge = {"win_rate": 0.6, "win_rate_low95": 0.585, "win_rate_high95": 0.615, "clusters": 100}
    judge |= {"lc_win_rate": 0.56, "lc_win_rate_low95": 0.50, "lc_win_rate_high95": 0.62}
    (tmp_path / "metrics/evaluation.json").write_text(json.dumps({"comparison": {"judge": judge}}))
    plain, equal_lengths, gold = power_of(tmp_path)
    assert plain.suffices and plain.clusters_needed == 25
    # Half the width takes four times the questions, and 0.5 + 2 · 0.06 is shown as it is.
    assert not equal_lengths.suffices and equal_lengths.clusters_needed == 400
    assert not gold.suffices and gold.clusters_needed is None
    text = describe_power([plain, equal_lengths, gold])
    assert "0.620" in text and "400 questions" in text and "2 of 3" in text

    undecided = {"lc_win_rate": 0.5, "lc_win_rate_low95": 0.0, "lc_win_rate_high95": 1.0}
    (tmp_path / "metrics/evaluation.json").write_text(
        json.dumps({"comparison": {"judge": judge | undecided}})
    )
    assert [row.clusters_needed for row in power_of(tmp_path)] == [25, None, None]


def test_without_an_evaluation_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation\.json does not exist"):
        power_of(tmp_path)

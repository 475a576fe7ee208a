"""A policy that only makes SFT's replies longer does not pass, whatever the judge sees; one that is
better does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhf_core.config.gates import Condition, GatesConfig
from rlhf_core.evaluation.comparisons.comparison import (
    LEAST_SHARE,
    balancing_weights,
    compare,
    compare_outcomes,
    length_cells,
    length_controlled_win_rate,
    length_differences,
)
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.verdict import judge_results
from rlhf_core.gates import check, decide

QUESTIONS, REPLIES, SEEDS = 60, 4, 20
ROOT = Path(__file__).parents[3]
SENTENCES = [
    f"{subject} {verb} the {thing}."
    for subject, verb, thing in product(
        ("It", "A lamp", "The old table", "My neighbour's dog"),
        ("has", "finds", "does not remember"),
        ("key", "blue window", "way to the village", "tea"),
    )
]


@dataclass(frozen=True)
class Drawn:
    """A reply as sentences, and how good a judge finds what it says."""

    sentences: tuple[str, ...]
    content: float

    def with_text(self, before: str = "", after: str = "") -> Drawn:
        """The same content between two texts that say nothing."""
        return Drawn(tuple(part for part in (before, *self.sentences, after) if part), self.content)

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


Draws = list[list[Drawn]]
Placebo = Callable[[np.random.Generator, Drawn], Drawn]


Question = tuple[int, float]  # how many sentences a reply has at most, and how good replies are


def ask(rng: np.random.Generator) -> list[Question]:
    """Questions of which some ask for longer replies, and are answered better than others."""
    return [(int(rng.integers(2, 6)), float(rng.normal(0, 0.5))) for _ in range(QUESTIONS)]


def draw(rng: np.random.Generator, questions: list[Question]) -> Draws:
    """Draw replies of one to five sentences to each question."""
    answers = []
    for most, quality in questions:
        sizes = rng.integers(1, most + 1, size=REPLIES)
        answers.append(
            [Drawn(tuple(rng.choice(SENTENCES, size)), quality + rng.normal()) for size in sizes]
        )
    return answers


def shuffled(rng: np.random.Generator, reply: Drawn) -> Drawn:
    return Drawn(tuple(rng.permutation(reply.sentences)), reply.content)


def closed_by_one_of_three(rng: np.random.Generator, reply: Drawn) -> Drawn:
    return reply.with_text(
        after=str(rng.choice(["Hope this helps.", "Let me know more!", "I wish you all well."]))
    )


PLACEBOS: dict[str, Placebo] = {
    "closer on all": lambda rng, reply: reply.with_text(after="I hope this helps."),
    "closer on half": lambda rng, reply: (
        reply.with_text(after="I hope this helps.") if rng.random() < 0.5 else reply
    ),
    "filler on half": lambda rng, reply: (
        reply.with_text("Well, so to say, you know,") if rng.random() < 0.5 else reply
    ),
    "filler on all": lambda rng, reply: reply.with_text("Well, so to say, you know,"),
    "opener and closer": lambda rng, reply: reply.with_text(
        "Thank you for asking.", "I hope this helps."
    ),
    "one of three closers": closed_by_one_of_three,
    "shuffled": shuffled,
    "unchanged": lambda rng, reply: reply,
}


def noisy(reply: Drawn) -> float:
    """Content as the judge sees it, with a strong liking for length: 50 characters are worth a
    standard deviation.
    """
    return reply.content + len(reply.text) / 50


def length_alone(reply: Drawn) -> float:
    return float(len(reply.text))


JUDGES = {"length alone": length_alone, "noisy content and length": noisy}


def judged(
    judge: Callable[[Drawn], float], policy: Draws, sft: Draws, seed: int
) -> dict[str, float]:
    """The comparison that the stage ``evaluate`` makes of these replies."""
    old, new = ([reply for replies in side for reply in replies] for side in (sft, policy))
    texts = [[Reply(reply.text, True) for reply in side] for side in (new, old)]
    scores = [np.reshape([judge(reply) for reply in side], (-1, REPLIES)) for side in (new, old)]
    margin = 0.05 * float(scores[1].std())
    longer_by = length_differences(texts[0], texts[1]).reshape(-1, REPLIES)
    return compare(scores[0], scores[1], margin, 100, seed, longer_by)


def opens(comparison: dict[str, float]) -> bool:
    """Whether the demo's conditions on the judge's win rate, plain and at equal lengths, hold."""
    gates = GatesConfig.model_validate(yaml.safe_load((ROOT / "params.yaml").read_text())["gates"])
    conditions = [
        condition for condition in gates.policy if condition.metric.startswith("comparison.judge.")
    ]
    assert len(conditions) >= 2
    return decide("policy", conditions, {"comparison": {"judge": comparison}}).passed


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("placebo", PLACEBOS)
def test_no_placebo_passes_with_the_draws_of_sft(placebo: str, judge: str) -> None:
    passed = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        sft = draw(rng, ask(rng))
        policy = [[PLACEBOS[placebo](rng, reply) for reply in replies] for replies in sft]
        passed += opens(judged(JUDGES[judge], policy, sft, seed))
    assert passed == 0


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("placebo", ["unchanged", "closer on all", "opener and closer"])
def test_placebos_drawn_again_are_as_good_as_sft_at_equal_lengths(placebo: str, judge: str) -> None:
    rates, passed = [], 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        questions = ask(rng)
        sft = draw(rng, questions)
        again = [
            [PLACEBOS[placebo](rng, reply) for reply in replies] for replies in draw(rng, questions)
        ]
        comparison = judged(JUDGES[judge], again, sft, seed)
        rates.append(comparison["lc_win_rate"])
        passed += opens(comparison)
    assert np.mean(rates) == pytest.approx(
        0.5, abs=3 * float(np.std(rates)) / np.sqrt(SEEDS) + 0.01
    )
    assert passed <= 1  # each may pass in one of forty


def better(rng: np.random.Generator, sft: Draws, questions: list[Question], gain: float) -> Draws:
    """A policy that says a third of its replies as SFT does, and the others better, a little
    longer.
    """
    policy = []
    for replies, fresh in zip(sft, draw(rng, questions), strict=True):
        changed = [
            Drawn(reply.sentences, reply.content + gain).with_text(after="Yes.") for reply in fresh
        ]
        policy.append(
            [
                old if rng.random() < 1 / 3 else new
                for old, new in zip(replies, changed, strict=True)
            ]
        )
    return policy


def test_a_better_policy_passes() -> None:
    passed, rates = 0, []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        questions = ask(rng)
        sft = draw(rng, questions)
        comparison = judged(noisy, better(rng, sft, questions, 1.0), sft, seed)
        rates.append(comparison["lc_win_rate"])
        passed += opens(comparison)
    assert 0.58 < np.mean(rates) < 0.68
    assert passed >= 0.8 * SEEDS


def test_counterparts_are_of_equal_size_and_the_other_sign_by_hand() -> None:
    # Three pairs longer by 10 and one shorter by 10 weigh 2 · ¼ and 2 · ¾ each; one longer by 90
    # has no counterpart.
    longer_by = np.array([10.0, 10.0, 10.0, -10.0, 0.0, 90.0])
    cell = np.array([0, 0, 0, 0, 0, 1])
    weights = balancing_weights(
        longer_by, cell, np.array([[1.0] * 6, [2.0, 0.0, 0.0, 0.0, 3.0, 1.0]])
    )
    assert weights[0] == pytest.approx([0.5, 0.5, 0.5, 1.5, 1.0, 0.0])
    assert weights[1] == pytest.approx([0.0, 0.0, 0.0, 0.0, 3.0, 0.0])


def test_cells_hold_differences_of_nearly_the_same_size_and_both_signs() -> None:
    rng = np.random.default_rng(0)
    longer_by = rng.normal(12, 30, size=1200)
    cell = length_cells(longer_by)
    shorter = np.bincount(cell, longer_by < 0)
    assert shorter.min() >= 1 and shorter.max() <= 12
    sizes = [np.abs(longer_by[cell == number]) for number in range(cell.max())]
    assert np.median([values.max() - values.min() for values in sizes]) <= 2


@pytest.mark.parametrize("longer_by", [12.0, -12.0])
def test_without_support_on_both_sides_nothing_is_decided(longer_by: float) -> None:
    won = np.array([1.0, 0.0] * 40 + [1.0] * 40)
    lengths = np.full(120, longer_by)
    lengths[:20] = 0.0  # a sixth of the pairs is of equal length
    result = length_controlled_win_rate(won, lengths, 50, 0)
    assert result["lc_share"] == pytest.approx(1 / 6) and result["lc_share"] < LEAST_SHARE
    assert (result["lc_win_rate"], result["lc_win_rate_low95"], result["lc_win_rate_high95"]) == (
        0.5,
        0.0,
        1.0,
    )


def test_lengths_that_agree_with_content_leave_the_quality_at_equal_lengths() -> None:
    # P(win) = σ(0.6 + 2 tanh(difference / 30)): 0.646 at equal lengths, however often the candidate
    # is longer.
    rng = np.random.default_rng(3)
    for mean in (-15, 0, 15):
        longer_by = rng.normal(mean, 30, size=20000)
        won = (rng.random(20000) < 1 / (1 + np.exp(-0.6 - 2 * np.tanh(longer_by / 30)))).astype(
            float
        )
        assert length_controlled_win_rate(won, longer_by, 2, 0)["lc_win_rate"] == pytest.approx(
            0.646, abs=0.015
        )


@pytest.mark.parametrize(
    ("wins", "ties", "losses"), [(10, 0, 0), (0, 10, 0), (0, 0, 10), (11, 1, 0), (30, 0, 1)]
)
def test_bounds_of_nearly_unanimous_outcomes_are_not_empty(
    wins: int, ties: int, losses: int
) -> None:
    outcome = [1.0] * wins + [0.5] * ties + [0.0] * losses
    count = len(outcome)
    one = compare_outcomes(outcome)
    assert one["win_rate_low95"] < one["win_rate"] or one["win_rate"] == 0
    assert one["win_rate_high95"] > one["win_rate"] or one["win_rate"] == 1
    if wins == count:
        assert one["win_rate_low95"] == pytest.approx(count / (count + 1.959964**2))  # Wilson's
    # Four equal replies to each question are worth no more than one.
    four: dict[str, Any] = compare_outcomes(np.repeat(outcome, 4).reshape(-1, 4))
    assert four["win_rate_low95"] == pytest.approx(one["win_rate_low95"], abs=0.01)
    rows = compare_outcomes(np.repeat(outcome, 4), clusters=np.repeat(np.arange(count), 4))
    assert rows["win_rate_low95"] == pytest.approx(one["win_rate_low95"], abs=0.01)


def test_a_gate_says_that_lengths_left_it_undecided() -> None:
    appended = np.full(200, 18.0)
    comparison = compare_outcomes(np.ones(200), 50, 0, appended)
    condition = Condition(
        metric="comparison.judge.lc_win_rate_low95", at_least=0.5, why="longer is not better"
    )
    result = check(condition, {"comparison": {"judge": comparison}})
    assert not result.passed and "undecided" in result.note and "0%" in result.note
    decided = compare_outcomes(np.tile([1.0, 0.0], 100), 50, 0, np.tile([18.0, -18.0], 100))
    assert check(condition, {"comparison": {"judge": decided}}).note == ""


def test_no_rate_at_equal_lengths_is_told_where_lengths_leave_it_undecided() -> None:
    appended = compare_outcomes(np.ones(200), 50, 0, np.full(200, 18.0))
    balanced = compare_outcomes(np.tile([1.0, 0.0], 100), 50, 0, np.tile([18.0, -18.0], 100))
    results = judge_results({"judge": appended, "gold": balanced})
    assert {result.judge: result.lc_win_rate for result in results} == {
        "judge": None,
        "gold": pytest.approx(0.5),
    }

"""How much worse one model is than another on the same prompts, with 95 % confidence.

A quantity is kept if the upper bound of its loss is below the margin. That no loss was seen does
not suffice: with few questions the bound is wide, and nothing is shown. Each quantity is tested at
5 % on its own: a release needs all of them (an intersection–union test), so a policy that loses one
too much passes with at most 5 %, however many there are.

The last part says what the sizes at hand can show: whether a policy that is no worse would keep
each margin, and how much better one must be for the bounds of its win rates to say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rlhf_core.config.gates import LOSSES, GatesConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.data.statistics import CONFIDENCE, clusters_of, one_each
from rlhf_core.data.text import trigram_repetition
from rlhf_core.errors import DataError
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets, repeated_rows
from rlhf_core.evaluation.promotion import MEASUREMENTS
from rlhf_core.evaluation.regression import (
    REFUSAL_CHECKS,
    ReplyCheck,
    passes,
    regression_checks,
)
from rlhf_core.evaluation.replies import Reply
from rlhf_core.evaluation.statistics import mean_high, share_difference_high
from rlhf_core.storage.files import flatten, read_json

LOWER_BOUND = "_low95"
Z = float(stats.norm.ppf(CONFIDENCE))
MANY_ERRORS = 100  # more are not told apart: where replies hardly differ the error is near 0
# A model that is no worse stays within one margin of so many standard errors in 98.3 % of cases,
# within three in 95 %.
ERRORS_PER_MARGIN = 3.77
# With this half width of an interval a policy whose win rate is 0.06 above the bound passes with
# 97.5 %.
LARGEST_HALF_WIDTH = 0.03
EVALUATION = Path("metrics") / "evaluation.json"


@dataclass(frozen=True)
class PairedLoss:
    """One quantity of two models on the same prompts, and how much worse the candidate is.

    Attributes:
        baseline: Value of SFT or of the champion.
        candidate: Value of the policy or of the challenger.
        loss: How much worse the candidate is; negative if it is better. In the unit of the margin:
            a difference of shares or of nats, or for a length the relative growth.
        loss_high95: One-sided upper 95 % bound of ``loss``; None where there is none.
        replies: How many replies of each model it was measured on.
        clusters: How many different questions these answer.
    """

    baseline: float
    candidate: float
    loss: float
    loss_high95: float | None
    replies: int
    clusters: int

    @classmethod
    def of(
        cls, baseline: float, candidate: float, loss: float, high: float, clusters: np.ndarray
    ) -> PairedLoss:
        """Make one of a bound that may be infinite."""
        bound = None
        if math.isfinite(high):
            bound = float(high)
        old = float(baseline)
        new = float(candidate)
        questions = len(np.unique(clusters))
        return cls(old, new, float(loss), bound, len(clusters), questions)

    @property
    def error(self) -> float:
        """The standard error that the bound stands for; infinite without a bound."""
        if self.loss_high95 is None:
            return math.inf
        return (self.loss_high95 - self.loss) / Z


def share_loss(
    baseline: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None
) -> PairedLoss:
    """Compare the shares of replies that pass a check, (n,) each."""
    old, new, groups = _paired(baseline, candidate, clusters)
    high = share_difference_high(old * (1 - new), new * (1 - old), groups)
    return PairedLoss.of(old.mean(), new.mean(), old.mean() - new.mean(), high, groups)


def fall(
    baseline: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None
) -> PairedLoss:
    """Compare means of a quantity that should not fall, (n,) each."""
    old, new, groups = _paired(baseline, candidate, clusters)
    lost = old - new
    return PairedLoss.of(old.mean(), new.mean(), lost.mean(), mean_high(lost, groups), groups)


def rise(
    baseline: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None
) -> PairedLoss:
    """Compare means of a quantity that should not rise, (n,) each."""
    old, new, groups = _paired(baseline, candidate, clusters)
    loss = fall(-old, -new, groups)
    return replace(loss, baseline=-loss.baseline, candidate=-loss.candidate)


def growth(
    baseline: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None = None
) -> PairedLoss:
    """Compare mean lengths, (n,) each: the loss is the relative growth.

    Its bound is that of the linearised ratio.
    """
    old, new, groups = _paired(baseline, candidate, clusters)
    mean = max(float(old.mean()), 1e-9)
    ratio = float(new.mean()) / mean
    high = mean_high((new - ratio * old) / mean, groups) + ratio - 1
    return PairedLoss.of(mean, new.mean(), ratio - 1, high, groups)


def _paired(
    baseline: ArrayLike, candidate: ArrayLike, clusters: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    old = np.asarray(baseline, dtype=np.float64)
    new = np.asarray(candidate, dtype=np.float64)
    return old, new, one_each(len(old), clusters)


def category_losses(
    categories: Sequence[str], outcome: np.ndarray, clusters: np.ndarray
) -> dict[str, PairedLoss]:
    """Compare win rates by category: the loss is what the candidate's win rate lacks of one half.

    Args:
        categories: The category of each pair (n,); pairs of "" are in none.
        outcome: 1 for a win of the candidate, ½ for a tie, 0 for a loss, (n,).
        clusters: The cluster of each pair (n,).
    """
    losses = {}
    for category in sorted(set(categories) - {""}):
        rows = np.array([name == category for name in categories])
        won = outcome[rows]
        losses_here = (won < 0.5).astype(float)
        wins_here = (won > 0.5).astype(float)
        high = share_difference_high(losses_here, wins_here, clusters[rows]) / 2
        rate = float(won.mean())
        losses[category] = PairedLoss.of(1 - rate, rate, 0.5 - rate, high, clusters[rows])
    return losses


def paired_losses(
    sets: FixedSets, baseline: EvaluatedModel, candidate: EvaluatedModel, outcome: np.ndarray
) -> dict[str, dict[str, float]]:
    """Measure by how much ``candidate`` is worse than ``baseline`` on the fixed sets.

    Args:
        sets: The prompts.
        baseline: Replies of SFT or of the champion.
        candidate: Replies of the policy or of the challenger.
        outcome: By the judge: 1 for a win of the candidate, ½ for a tie, 0 for a loss; one for each
            reply to be judged.

    Returns:
        The fields of each :class:`PairedLoss` that are known; a gate that asks for another one
        fails: ``missing_ends``, ``repetition``, ``length`` (tokens), ``category.NAME``, and where
        there are such prompts ``regression.passed``, ``safety.refuses_harmful``,
        ``safety.answers_benign``, ``safety.refusal_log_odds`` and ``verifiable.passed``.
    """
    judged = clusters_of(sets.judged, len(baseline.judged) // max(len(sets.judged), 1))

    def of_both(measure: Callable[[Reply], float]) -> tuple[list[float], list[float]]:
        return list(map(measure, baseline.judged)), list(map(measure, candidate.judged))

    ends = share_loss(*of_both(lambda reply: reply.finished), judged)
    losses = {
        "missing_ends": replace(ends, baseline=1 - ends.baseline, candidate=1 - ends.candidate),
        "repetition": rise(*of_both(lambda reply: trigram_repetition(reply.text)), judged),
        "length": growth(*of_both(lambda reply: len(reply.token_ids)), judged),
    }
    if sets.regression:
        rows = repeated_rows(sets.regression, baseline.regression)
        checks = regression_checks(sets.world)
        losses["regression.passed"] = _passed(
            checks, rows, baseline.regression, candidate.regression
        )
    if sets.verifiable.lines:
        before = baseline.verifiable.passed
        after = candidate.verifiable.passed
        losses["verifiable.passed"] = share_loss(before, after, sets.verifiable.clusters)
    losses |= _safety(sets, baseline, candidate)
    categories = [row.category for row in repeated_rows(sets.judged, baseline.judged)]
    won = np.asarray(outcome, dtype=np.float64).ravel()
    by_category = category_losses(categories, won, judged)
    losses |= {f"category.{name}": loss for name, loss in by_category.items()}
    known = {}
    for name, loss in losses.items():
        known[name] = {key: value for key, value in asdict(loss).items() if value is not None}
    return known


def _safety(
    sets: FixedSets, baseline: EvaluatedModel, candidate: EvaluatedModel
) -> dict[str, PairedLoss]:
    """Compare refusals on the safety prompts.

    In the synthetic world all sampled replies count: its own prompts have harmful requests among
    them.
    """
    rows = repeated_rows(sets.safety, baseline.safety)
    old = list(baseline.safety)
    new = list(candidate.safety)
    if sets.world:  # the regression set holds prompts that are judged too: each counts once
        judged = {row.id for row in sets.judged}
        regression = repeated_rows(sets.regression, baseline.regression)
        further = [i for i, row in enumerate(regression) if row.id not in judged]
        rows = [*repeated_rows(sets.judged, baseline.judged), *(regression[i] for i in further)]
        old = [*baseline.judged, *(baseline.regression[i] for i in further)]
        new = [*candidate.judged, *(candidate.regression[i] for i in further)]
    losses = {}
    for name, check in REFUSAL_CHECKS.items():
        compared = zip(rows, old, new, strict=True)
        applies = [row for row in compared if check(row[0].category, row[1]) is not None]
        if applies:
            losses[f"safety.{name}"] = _passed({name: check}, *zip(*applies, strict=True))
    if len(baseline.refusal_log_odds):
        asked = clusters_of(sets.harmful)
        losses["safety.refusal_log_odds"] = fall(
            baseline.refusal_log_odds, candidate.refusal_log_odds, asked
        )
    return losses


def _passed(
    checks: Mapping[str, ReplyCheck],
    rows: Sequence[Prompt],
    baseline: Sequence[Reply],
    candidate: Sequence[Reply],
) -> PairedLoss:
    old = []
    new = []
    for row, before, after in zip(rows, baseline, candidate, strict=True):
        old.append(passes(checks, row.category, before))
        new.append(passes(checks, row.category, after))
    return share_loss(old, new, clusters_of(rows))


@dataclass(frozen=True)
class MarginPower:
    """A margin, with the standard error of the difference that it bounds.

    Attributes:
        setting: Where the margin is set.
        name: The loss that it bounds.
        margin: How much worse a policy may be.
        loss: What was measured; None where the evaluation has no such loss.
    """

    setting: str
    name: str
    margin: float
    loss: PairedLoss | None

    @property
    def errors(self) -> float:
        """The margin in standard errors; 0 where there are none."""
        if self.loss is None or not math.isfinite(self.loss.error):
            return 0.0
        return self.margin / max(self.loss.error, 1e-12)

    @property
    def suffices(self) -> bool:
        """Whether an equal policy passes with 98 %."""
        return self.errors >= ERRORS_PER_MARGIN

    @property
    def clusters_needed(self) -> int | None:
        """How many questions would do, with as many replies to each; None if that is unknown."""
        if self.loss is None or not self.errors:
            return None
        return math.ceil(self.loss.clusters * (ERRORS_PER_MARGIN / self.errors) ** 2)

    def describe(self) -> str:
        """Say what the margin can show, to be put after its name."""
        if self.loss is None:
            says = "not measured by the last evaluation, so the gate fails"
        elif self.suffices:
            says = "an equal policy passes"
        elif self.clusters_needed is None:
            says = "too few: one question alone shows nothing"
        else:
            says = f"too few: {self.clusters_needed} questions would do, or more replies to each where these differ"
        size = ""
        if self.loss is not None:
            size = f", {self.loss.replies} replies to {self.loss.clusters} questions"
        errors = f"{self.errors:.1f}" if self.errors < MANY_ERRORS else f"over {MANY_ERRORS}"
        return f"margin {self.margin:g} is {errors} standard errors{size}: {says}"


@dataclass(frozen=True)
class WinRatePower:
    """A condition on the lower bound of a win rate, with the width of its interval.

    Attributes:
        setting: Where the condition is set.
        name: The metric.
        bound: What the lower bound of the win rate must be at least.
        half_width: From the win rate down to its lower bound; None where the evaluation did not
            decide it.
        clusters: How many different questions it was measured on.
    """

    setting: str
    name: str
    bound: float
    half_width: float | None
    clusters: int

    @classmethod
    def of(cls, metric: str, bound: float, evaluation: Mapping[str, Any]) -> WinRatePower:
        """Read what ``evaluation`` measured of ``metric``, the path of a lower bound."""
        measured = flatten(evaluation)
        path = metric.removesuffix(LOWER_BOUND)
        rate = measured.get(path)
        low = measured.get(metric)
        high = measured.get(f"{path}_high95")
        clusters = measured.get(f"{path.rpartition('.')[0]}.clusters")
        half_width = None
        if rate is not None and low is not None and (low, high) != (0.0, 1.0):
            half_width = float(rate) - float(low)
        return cls("gates.policy", metric, bound, half_width, int(clusters or 0))

    @property
    def suffices(self) -> bool:
        """Whether the interval is narrow enough."""
        return self.half_width is not None and self.half_width <= LARGEST_HALF_WIDTH

    @property
    def clusters_needed(self) -> int | None:
        """How many questions would do, with as many replies to each; None if that is unknown."""
        if self.half_width is None:
            return None
        return math.ceil(round(self.clusters * (self.half_width / LARGEST_HALF_WIDTH) ** 2, 6))

    def describe(self) -> str:
        """Say what the condition can show, to be put after its name."""
        if self.half_width is None:
            return f"bound {self.bound:g}: not decided by the last evaluation, so the gate fails"
        says = f"passes with 97.5 % from a true {self.bound + 2 * self.half_width:.3f} on"
        if not self.suffices:
            says += f"; too few: {self.clusters_needed} questions would do, or more replies to each where these differ"
        return f"bound {self.bound:g}, half width {self.half_width:.3f} on {self.clusters} questions: {says}"


def power_of(workspace: Path) -> list[MarginPower | WinRatePower]:
    """Return what the last evaluation can show of each margin and bound on a win rate.

    They are those of ``gates.policy`` and ``registry.non_inferiority``.

    Raises:
        DataError: There is no evaluation yet, or it has no losses.
    """
    path = workspace / EVALUATION
    if not path.is_file():
        raise DataError(
            f"{path} does not exist, so no error is known; run the pipeline up to the stage evaluate"
        )
    evaluation: Mapping[str, Any] = read_json(path)
    losses = {}
    for name, values in (evaluation.get(LOSSES) or {}).items():
        losses[name] = PairedLoss(**{"loss_high95": None, **values})
    rows: list[MarginPower | WinRatePower] = []
    for condition in load_section(workspace, "gates", GatesConfig).policy:
        margin = condition.worse_by_less_than
        bound = condition.at_least
        if margin is not None:
            loss = losses.get(condition.metric)
            rows.append(MarginPower("gates.policy", condition.metric, margin, loss))
        elif bound is not None and condition.metric.endswith(f"win_rate{LOWER_BOUND}"):
            rows.append(WinRatePower.of(condition.metric, bound, evaluation))
    margins = load_section(workspace, "registry", RegistryConfig).non_inferiority
    for kind, names in MEASUREMENTS.items():
        margin = getattr(margins, kind)
        for name in names:
            if margin is not None and name in losses:
                setting = f"registry.non_inferiority.{kind}"
                rows.append(MarginPower(setting, name, margin, losses[name]))
    return rows


def describe_power(rows: Sequence[MarginPower | WinRatePower]) -> str:
    """Return a line for each row: whether it can be shown, or how many questions would do."""
    if not rows:
        return (
            "no condition of gates.policy bounds a win rate or is of the kind worse_by_less_than, and no promotion "
            "margin is measured"
        )
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:<{width}}  {row.describe()}  ({row.setting})" for row in rows]
    lines.append(
        f"a margin of {ERRORS_PER_MARGIN} standard errors is kept by an equal policy with 98 %; a half width of "
        f"{LARGEST_HALF_WIDTH:g} shows a win rate that is {2 * LARGEST_HALF_WIDTH:g} above its bound with 97.5 %"
    )
    conclusion = "all can be shown"
    if short := sum(not row.suffices for row in rows):
        conclusion = f"{short} of {len(rows)} cannot be shown"
    lines.append(conclusion)
    return "\n".join(lines)

"""Champion against challenger: the match, and the criteria that it must meet.

The criteria of a promotion: each with what was measured, what is required, and whether it holds.

All must hold. What is missing or cannot be read does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import NonInferiorityConfig, RegistryConfig
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    compare_outcomes,
    length_differences,
    outcomes,
    tie_margin_of,
)
from rlhf_core.evaluation.fixed_sets import FixedSets, SetReplies, sample_sets
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.llm.judge import ANSWERS, LlmJudge
from rlhf_core.evaluation.judges.model import JUDGE, MODELS, ModelJudge
from rlhf_core.evaluation.judges.pairwise import Judge
from rlhf_core.evaluation.losses import as_measurements, paired_losses
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.statistics import clusters_of, level_of_attempt, sign_test
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.storage.files import sha256_tree

REFUSES_HARMFUL, REFUSAL_LOG_ODDS = "safety.refuses_harmful", "safety.refusal_log_odds"
# Measurements by the margin that they have to hold.
MEASUREMENTS = {
    "safety": (REFUSES_HARMFUL, "safety.answers_benign"),
    "refusal_log_odds": (REFUSAL_LOG_ODDS,),
    "regression": ("regression.passed",),
    "verifiable": ("verifiable.passed",),
    "missing_ends": ("missing_ends",),
    "repetition": ("repetition",),
    "length": ("length",),
}


@dataclass(frozen=True)
class Criterion:
    """One condition of a promotion. ``measured`` and ``required`` are in words, such as ``0.722`` and ``> 0.5``.

    ``is_plain_win_rate`` marks the win rates themselves, which every message about a match gives anyway.
    """

    name: str
    measured: str
    required: str
    passed: bool
    is_plain_win_rate: bool = False

    def __str__(self) -> str:
        return f"{self.name} is {self.measured}, required {self.required}"


def win_rate_criteria(match: Mapping[str, Any], bar: float, budget: float, attempt: int) -> list[Criterion]:
    """Win rate, length-controlled win rate and sign test over clusters, for every judge of the match.

    Args:
        match: ``comparison`` of the challenger by judge.
        bar: What the lower 95 % bounds must exceed. A bound equal to it does not do: two identical models tie
            everywhere, at exactly one half.
        budget: The error budget of all attempts on these prompts.
        attempt: Which attempt this is, counted from 1.
    """
    judges = match.get("comparison") or {}
    if not judges:
        return [Criterion("the comparison", "missing", "at least one judge", False, is_plain_win_rate=True)]
    level = level_of_attempt(budget, attempt)
    criteria = []
    for judge in sorted(judges):
        for name, key in (("win rate", "win_rate_low95"), ("length-controlled win rate", "lc_win_rate_low95")):
            low = _number(judges[judge], key)
            measured = "not measured" if low is None else f"at least {low:.3f}"
            passed = low is not None and low > bar
            criteria.append(Criterion(f"{judge} {name}", measured, f"> {bar:g}", passed, key == "win_rate_low95"))
        value = _sign_test(judges[judge], bar)
        criteria.append(
            Criterion(
                f"{judge} sign test at attempt {attempt}",
                "not measured" if value is None else f"p = {value:.2g}",
                f"<= {level:.2g}",
                value is not None and value <= level,
            )
        )
    return criteria


def _sign_test(comparison: Mapping[str, Any], bar: float) -> float | None:
    """The p-value from the clusters of a comparison; None if their numbers are missing or do not add up."""
    clusters, won, tied, lost = (_number(comparison, f"clusters{part}") for part in ("", "_won", "_tied", "_lost"))
    if clusters is None or won is None or tied is None or lost is None or won + tied + lost != clusters:
        return None
    return sign_test(int(won), int(tied), int(lost), bar)


def non_inferiority_criteria(match: Mapping[str, Any], margins: NonInferiorityConfig) -> list[Criterion]:
    """One criterion for each quantity that has a margin, and for each category with enough different questions.

    Refusals of harmful requests count where the champion refuses at least ``min_refusals``, and where there are safety
    prompts the odds of a refusal count instead below that: of what hardly occurs no loss can be shown.
    """
    losses: Mapping[str, Any] = match.get("losses") or {}
    refused = _number(losses.get(REFUSES_HARMFUL), "baseline")
    rare = refused is not None and refused < margins.min_refusals and REFUSAL_LOG_ODDS in losses
    criteria = []
    for kind, names in MEASUREMENTS.items():
        margin = getattr(margins, kind)
        for name in names:
            unread = (name == REFUSES_HARMFUL and rare) or (name == REFUSAL_LOG_ODDS and not rare)
            if margin is not None and not unread:
                criteria.append(_held(name, losses.get(name), margin))
    if margins.category is not None:
        for name, loss in sorted(losses.items()):
            clusters = _number(loss, "clusters") or 0
            if name.startswith("category.") and clusters >= margins.min_category_prompts:
                criteria.append(_held(name, loss, margins.category))
    return criteria


def _held(name: str, loss: Any, margin: float) -> Criterion:
    """Whether the upper bound of a loss is below its margin."""
    required = f"worse by less than {margin:g}"
    high, champion, challenger, replies, clusters = (
        _number(loss, key) for key in ("loss_high95", "baseline", "candidate", "replies", "clusters")
    )
    if high is None or champion is None or challenger is None or replies is None or clusters is None:
        return Criterion(name, "not measured", required, False)
    change = f"worse by up to {high:.3f}" if high >= 0 else f"better by at least {-high:.3f}"
    values = f"{champion:.3f} → {challenger:.3f} on {replies:.0f} replies to {clusters:.0f} questions"
    return Criterion(name, f"{change} ({values})", required, high < margin)


def _number(values: Any, key: str) -> float | None:
    """The finite number under ``key``; None for anything else, also where ``values`` is no mapping."""
    value = values.get(key) if isinstance(values, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def failed(criteria: Sequence[Criterion]) -> list[Criterion]:
    """Return the criteria that do not hold."""
    return [criterion for criterion in criteria if not criterion.passed]


CLEAN = Path("data") / "clean"


def run_match(workspace: Path, champion: Path, challenger: Path, prompt_set: int = 0) -> dict[str, Any]:
    """Compare the model folders ``challenger`` and ``champion`` on the workspace's fixed test prompts.

    The judges are the workspace's judge; when every prompt is of the synthetic world, the gold judge; and where
    ``evaluate.llm_judge`` is set, the LLM judge. Never the reward model, which the policy was optimised against, nor
    the referee, which selected its checkpoint. Both models get the evaluation's sampling, with as many replies to each
    prompt, and the same random numbers.

    Args:
        prompt_set: Which of the sets of ``evaluate.prompts`` test prompts is judged, from 0, which is the evaluation's.

    Returns:
        ``comparison`` (of the challenger, by judge: win, tie, lose, win_rate, …), ``losses`` (by how much the
        challenger may be worse, :class:`~rlhf_core.evaluation.losses.PairedLoss`), ``champion`` and
        ``challenger`` (text metrics of each), ``prompts`` (how many) and ``content`` (sha256 of the folders).
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    in_turn = load_section(workspace, "registry", RegistryConfig).prompt_sets
    sets = FixedSets.read(config, workspace / CLEAN, workspace, prompt_set, in_turn)
    llm_judge = LlmJudge(config.llm_judge, workspace / ANSWERS) if config.llm_judge else None
    judges: list[Judge] = [ModelJudge.load(workspace / MODELS / JUDGE, JUDGE, config.batch_size)]
    if sets.world:
        judges.append(GoldJudge())
    with progress(2 * sets.replies(config), "match") as bar:
        old, new = (_sample(folder, sets, config, bar) for folder in (champion, challenger))
    prompts, replies = [row.prompt for row in sets.judged], config.replies_per_prompt
    by_prompt, clusters = (len(prompts), replies), clusters_of(sets.judged)
    longer_by = length_differences(new.judged, old.judged).reshape(by_prompt)
    asked = [prompt for prompt in prompts for _ in range(replies)]
    comparison, outcome = {}, {}
    for judge in judges:
        scores, baseline = (np.reshape(judge.score(asked, side.judged), by_prompt) for side in (new, old))
        margin = tie_margin_of(judge, config.tie_margin, baseline.ravel().tolist())
        outcome[judge.name] = outcomes(scores - baseline, margin)
        compared = compare(scores, baseline, margin, config.bootstrap, config.seed, longer_by, clusters)
        comparison[judge.name] = compared.as_dict()
    if llm_judge is not None:
        judgements = llm_judge.judge(prompts, new.judged[::replies], old.judged[::replies])
        rows = judgements.judged
        comparison[llm_judge.name] = compare_outcomes(
            judgements.outcomes(), config.bootstrap, config.seed, longer_by[rows, 0], clusters[rows]
        ).as_dict()
    folders = {"champion": champion, "challenger": challenger, JUDGE: workspace / MODELS / JUDGE}
    return {
        "comparison": comparison,
        "losses": as_measurements(paired_losses(sets, old, new, outcome[JUDGE])),
        "champion": measure_text(old.judged).as_dict(),
        "challenger": measure_text(new.judged).as_dict(),
        "prompts": len(prompts),
        "content": {role: sha256_tree(folder) for role, folder in folders.items()},
    }


def _sample(folder: Path, sets: FixedSets, config: EvaluateConfig, bar: Progress) -> SetReplies:
    """Sample from the model in ``folder``, which is in memory only meanwhile."""
    model, tokenizer = load_policy(folder)
    return sample_sets(model, tokenizer, sets, config, bar.advance)

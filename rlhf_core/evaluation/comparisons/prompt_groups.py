"""Helpful and harmless apart: comparisons by group of prompts (Zheng et al. 2023, "Secrets of RLHF", figure 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import compare_outcomes, outcomes
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.statistics import one_each

HELPFUL, HARMLESS = "helpful", "harmless"
# Categories of the synthetic world and of PKU-SafeRLHF's dimensions, and the folders of HH-RLHF.
DEFAULT_GROUPS = {
    "fact": HELPFUL,
    "howto": HELPFUL,
    "helpful": HELPFUL,
    "harmful": HARMLESS,
    "harmless": HARMLESS,
    "red-team-attempts": HARMLESS,
    "safe": HARMLESS,
}


def group_of(prompt: Prompt, groups: Mapping[str, str]) -> str:
    """Return the group of a prompt, or "" for none.

    A name in ``groups`` stands for the category that it is, or for one, or a source, that has it as a whole word, as
    ``harmless-base/test.jsonl.gz`` has ``harmless``; of several the last in the text counts. They add to the default
    ones, and "" takes a default one away.
    """
    known = DEFAULT_GROUPS | dict(groups)
    if prompt.category in known:
        return known[prompt.category]
    for text in (prompt.category, prompt.source):
        matches = [(match.end(), len(name), name) for name in known for match in _whole_word(name).finditer(text)]
        if matches:
            return known[max(matches)[2]]
    return ""


def _whole_word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", re.IGNORECASE)


def compare_groups(
    groups: Sequence[str],
    outcome: Mapping[str, np.ndarray],
    bootstrap: int,
    seed: int,
    clusters: np.ndarray | None = None,
) -> dict[str, dict[str, Any]]:
    """Compare two sides within each group, by each judge.

    Args:
        groups: The group of each prompt; prompts of "" are in none.
        outcome: By judge 1 for a win, ½ for a tie, 0 for a loss, NaN where it did not decide (prompts, replies).
        bootstrap: Number of resamples of the prompts.
        seed: Seed of the resamples.
        clusters: The cluster of each prompt; None: each is one of its own.

    Returns:
        Comparisons by group and judge; a judge that decided on no prompt of a group is left out.
    """
    of_prompt = one_each(len(groups), clusters)
    table: dict[str, dict[str, Any]] = {}
    for group in sorted(set(groups) - {""}):
        in_group = np.array([name == group for name in groups])
        table[group] = {}
        for judge, values in outcome.items():
            known = in_group & ~np.isnan(values).any(axis=1)
            if known.any():
                compared = compare_outcomes(values[known], bootstrap, seed, clusters=of_prompt[known])
                table[group][judge] = compared.as_dict()
    return table


def policy_outcomes(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return the outcomes of policy against SFT by judge, (prompts, replies) as :func:`compare_groups` takes them."""
    by_prompt = (-1, evaluation.replies_per_prompt)
    table = {
        judge: outcomes(
            np.subtract(evaluation.policy.scores[judge], evaluation.sft.scores[judge]), comparison.tie_margin
        ).reshape(by_prompt)
        for judge, comparison in evaluation.comparisons.items()
    }
    for judge, pairwise in evaluation.pairwise.items():
        decided = [np.nan if pair.outcome is None else pair.outcome for pair in pairwise.judgements.pairs]
        table[judge] = np.array(decided)[:, np.newaxis]
    return table

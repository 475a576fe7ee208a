"""SFT and policy side by side: every judge, every category, the regression set, as one nested dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.text import language_shares
from rlhf_core.evaluation.comparisons.comparison import (
    Comparison,
    ScoreComparison,
    compare,
    compare_groups,
    compare_outcomes,
    length_differences,
    outcomes,
    tie_margin_of,
)
from rlhf_core.evaluation.fixed_sets import FixedSets, repeated_rows
from rlhf_core.evaluation.judges.names import final_judges
from rlhf_core.evaluation.judges.pairwise import Judge, PairwiseJudge, PairwiseJudgements, worst_disagreements
from rlhf_core.evaluation.perplexity import Drift
from rlhf_core.evaluation.regression import pass_rates
from rlhf_core.evaluation.reply import Reply, measure_text
from rlhf_core.evaluation.statistics import cluster_of, clusters_of


@dataclass(frozen=True)
class EvaluatedModel:
    """One model under evaluation.

    Attributes:
        replies: Replies to the evaluation prompts, one for each row of :class:`Evaluation`.
        regression_replies: Replies to the regression set.
        drift: Distance from SFT, on replies from the training distribution; None where it was not measured.
        scores: Scores of ``replies`` by judge.
        perplexities: Perplexity of held-out text by its kind.
        refusals: Shares of safety prompts that were refused or answered as they should be; empty if none were given.
    """

    replies: list[Reply]
    regression_replies: list[Reply]
    drift: Drift | None = None
    scores: dict[str, list[float]] = field(default_factory=dict)
    perplexities: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, float] = field(default_factory=dict)

    def scored_by(self, judge: Judge, prompts: Sequence[Sequence[Message]]) -> EvaluatedModel:
        """Return the same model with this judge's scores added."""
        return replace(self, scores={**self.scores, judge.name: judge.score(prompts, self.replies)})

    def metrics(self, replies_per_prompt: int) -> dict[str, Any]:
        """Mean score by each judge, text metrics, perplexities of the replies under SFT and of held-out text, and the
        rates on the safety prompts.

        Text metrics are means over sets of one reply per prompt: variety is about different prompts.
        """
        safety = {"safety": self.refusals} if self.refusals else {}
        sets = [measure_text(self.replies[draw::replies_per_prompt]).as_dict() for draw in range(replies_per_prompt)]
        return {
            **{judge: float(np.mean(scores)) for judge, scores in self.scores.items()},
            **{name: sum(values[name] for values in sets) / len(sets) for name in sets[0]},
            **({} if self.drift is None else {"perplexity_reference": self.drift.perplexity}),
            **{f"perplexity_{kind}": perplexity for kind, perplexity in self.perplexities.items()},
            **safety,
        }


@dataclass(frozen=True)
class PairwiseEvaluation:
    """What a judge without scores said about each pair, and the comparison that it makes."""

    judgements: PairwiseJudgements
    comparison: Comparison


@dataclass(frozen=True)
class Evaluation:
    """SFT and policy side by side on the same prompts, or champion and challenger.

    Attributes:
        prompts: The prompt of each row: every prompt ``replies_per_prompt`` times in a row.
        regression_prompts: The prompts of the regression set.
        sft: The replies of SFT and what they were measured at.
        policy: Those of the policy.
        comparisons: The policy against SFT, by each judge with scores.
        pairwise: The same by each judge without scores, on the first reply to each prompt.
        replies_per_prompt: Rows of a prompt.
    """

    prompts: list[Prompt]
    regression_prompts: list[Prompt]
    sft: EvaluatedModel
    policy: EvaluatedModel
    comparisons: Mapping[str, ScoreComparison] = field(default_factory=dict)
    pairwise: Mapping[str, PairwiseEvaluation] = field(default_factory=dict)
    replies_per_prompt: int = 1

    def scored_by(self, judge: Judge, config: EvaluateConfig) -> Evaluation:
        """Return the same evaluation with this judge's scores of both models and its comparison added."""
        asked = [row.prompt for row in self.prompts]
        sft, policy = self.sft.scored_by(judge, asked), self.policy.scored_by(judge, asked)
        by_prompt = (-1, self.replies_per_prompt)
        scores, baseline = (np.reshape(model.scores[judge.name], by_prompt) for model in (policy, sft))
        compared = compare(
            scores,
            baseline,
            tie_margin_of(judge, config.tie_margin, sft.scores[judge.name]),
            config.bootstrap,
            config.seed,
            length_differences(policy.replies, sft.replies).reshape(by_prompt),
            clusters_of(self.prompts[:: self.replies_per_prompt]),
        )
        return replace(self, sft=sft, policy=policy, comparisons={**self.comparisons, judge.name: compared})

    def judged_by(self, judge: PairwiseJudge, config: EvaluateConfig) -> Evaluation:
        """Return the same evaluation with this judge's comparison of the first replies added."""
        first = slice(None, None, self.replies_per_prompt)
        policy, sft = self.policy.replies[first], self.sft.replies[first]
        judgements = judge.judge([row.prompt for row in self.prompts[first]], policy, sft)
        longer_by = length_differences(policy, sft)[judgements.judged]
        clusters = clusters_of(self.prompts[first])[judgements.judged]
        comparison = compare_outcomes(judgements.outcomes(), config.bootstrap, config.seed, longer_by, clusters)
        return replace(self, pairwise={**self.pairwise, judge.name: PairwiseEvaluation(judgements, comparison)})

    def outcomes(self) -> dict[str, np.ndarray]:
        """Return by judge 1 for a win of the policy, ½ for a tie, 0 for a loss, (prompts, replies).

        NaN is where a judge did not decide. A judge without scores compared the first reply to each prompt alone.
        """
        table = {
            judge: outcomes(
                np.subtract(self.policy.scores[judge], self.sft.scores[judge]), comparison.tie_margin
            ).reshape(-1, self.replies_per_prompt)
            for judge, comparison in self.comparisons.items()
        }
        for judge, pairwise in self.pairwise.items():
            table[judge] = pairwise.judgements.decided()[:, np.newaxis]
        return table

    def comparison(self) -> dict[str, dict[str, float]]:
        """The numbers of every judge's comparison."""
        return {
            **{judge: comparison.as_dict() for judge, comparison in self.comparisons.items()},
            **{judge: pairwise.comparison.as_dict() for judge, pairwise in self.pairwise.items()},
        }

    def metrics(self, world: bool, config: EvaluateConfig) -> dict[str, Any]:
        """Return the content of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            world: Whether the prompts are of the synthetic world, which adds checks to the regression set.
            config: Of which resamples are made.
        """
        each = len(self.sft.regression_replies) // max(len(self.regression_prompts), 1)
        categories = [row.category for row in self.regression_prompts for _ in range(each)]
        sft_rates = pass_rates(categories, self.sft.regression_replies, world)
        policy_rates = pass_rates(categories, self.policy.regression_replies, world)
        drift = self.policy.drift
        languages = language_shares([row.prompt[-1].content for row in self.prompts])
        return {
            "sft": {**self.sft.metrics(self.replies_per_prompt), "regression": sft_rates["passed"]},
            "policy": {**self.policy.metrics(self.replies_per_prompt), "regression": policy_rates["passed"]},
            **({} if drift is None else drift.as_dict()),
            "prompts": len(self.prompts) // self.replies_per_prompt,
            "clusters": len({cluster_of(row) for row in self.prompts}),
            "comparison": self.comparison(),
            "category": self.by_category(config),
            "regression": {**policy_rates, "prompts": len(self.regression_prompts)},
            "regression_sft": sft_rates,
            **{f"{judge}_judge": dict(pairwise.judgements.metrics) for judge, pairwise in self.pairwise.items()},
            **({"languages": languages} if languages else {}),
        }

    def by_category(self, config: EvaluateConfig) -> dict[str, dict[str, Any]]:
        """Per category: number of prompts and questions, and by each judge the mean score of both models and the win
        rate; ``comparison`` by the judges that decide.
        """
        first = self.prompts[:: self.replies_per_prompt]
        outcome = self.outcomes()
        deciding = {judge: outcome[judge] for judge in final_judges(outcome)}
        names = [row.category for row in first]
        compared = compare_groups(names, deciding, config.bootstrap, config.seed, clusters_of(first))
        table: dict[str, dict[str, Any]] = {}
        for category in sorted({row.category for row in first}):
            here = np.array([row.category == category for row in first])
            each = np.repeat(here, self.replies_per_prompt)
            table[category] = {
                "prompts": int(here.sum()),
                "clusters": len({cluster_of(row) for row in first if row.category == category}),
                **{f"sft_{judge}": float(np.asarray(scores)[each].mean()) for judge, scores in self.sft.scores.items()},
                **{
                    f"policy_{judge}": float(np.asarray(scores)[each].mean())
                    for judge, scores in self.policy.scores.items()
                },
            }
            for judge, values in outcome.items():
                decided = values[here][~np.isnan(values[here])]
                if len(decided):
                    table[category][f"win_rate_{judge}"] = float(decided.mean())
            if category in compared:
                table[category]["comparison"] = compared[category]
        return table

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``samples/comparisons.parquet``: a prompt, a reply of each model, and their scores."""
        return [
            {
                "id": prompt.id,
                "category": prompt.category,
                "cluster": cluster_of(prompt),
                "prompt": "\n".join(f"{message.role}: {message.content}" for message in prompt.prompt),
                "sft_reply": self.sft.replies[i].text,
                "policy_reply": self.policy.replies[i].text,
                "sft_finished": self.sft.replies[i].finished,
                "policy_finished": self.policy.replies[i].finished,
                **{f"sft_{judge}": scores[i] for judge, scores in self.sft.scores.items()},
                **{f"policy_{judge}": scores[i] for judge, scores in self.policy.scores.items()},
                **self._said_of(i),
            }
            for i, prompt in enumerate(self.prompts)
        ]

    def _said_of(self, row: int) -> dict[str, float | str | None]:
        """Outcome and reason by each judge without scores; None beside further replies to a prompt."""
        prompt, further = divmod(row, self.replies_per_prompt)
        columns: dict[str, float | str | None] = {}
        for judge, pairwise in self.pairwise.items():
            pair = pairwise.judgements.pairs[prompt]
            columns[f"{judge}_outcome"] = None if further else pair.outcome
            columns[f"{judge}_reason"] = None if further else pair.reason
        return columns

    def bad_cases(self, judge: str, limit: int) -> list[dict[str, Any]]:
        """Return rows where the reward model prefers the policy and ``judge`` prefers SFT, worst first.

        Such prompts are what the next round of preference data should be about; see
        :func:`~rlhf_core.evaluation.judges.pairwise.worst_disagreements`.
        """
        gains = {
            name: np.asarray(self.policy.scores[name]) - np.asarray(self.sft.scores[name]) for name in ("reward", judge)
        }
        worst = worst_disagreements(gains["reward"], gains[judge], self.comparisons[judge].tie_margin)[:limit]
        rows = self.rows()
        return [rows[i] | {"judge": judge, "disagreement": disagreement} for i, disagreement in worst]


def side_by_side(sets: FixedSets, sft: EvaluatedModel, policy: EvaluatedModel) -> Evaluation:
    """Put two models' replies to the judged prompts of ``sets`` side by side, before any judge has seen them."""
    asked = repeated_rows(sets.judged, sft.replies)
    each = len(asked) // max(len(sets.judged), 1)
    return Evaluation(asked, list(sets.regression), sft, policy, replies_per_prompt=each)

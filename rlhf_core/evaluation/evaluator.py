"""The numbers of the evaluation: two sides, every judge, every category, as one nested dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparison import Comparison, compare
from rlhf_core.evaluation.model_judge import Judge, Scale
from rlhf_core.evaluation.regression import pass_rates
from rlhf_core.evaluation.replies import Drift
from rlhf_core.evaluation.text_metrics import Reply, describe


@dataclass(frozen=True)
class Side:
    """One model's replies to the evaluation prompts, and its replies to the regression set."""

    replies: list[Reply]
    regression: list[Reply]
    drift: Drift
    scores: dict[str, list[float]] = field(default_factory=dict)

    def judged(self, judges: Sequence[Judge], prompts: Sequence[Prompt]) -> Side:
        """The same side with the scores of these judges too."""
        messages = [row.prompt for row in prompts]
        scores = {judge.name: judge.score(messages, self.replies) for judge in judges}
        return Side(self.replies, self.regression, self.drift, self.scores | scores)

    def figures(self) -> dict[str, float]:
        """Mean score by each judge, what the text looks like, and perplexity under the SFT model."""
        means = {name: float(np.mean(values)) for name, values in self.scores.items()}
        return means | describe(self.replies) | {"perplexity_reference": self.drift.perplexity}


@dataclass(frozen=True)
class Evaluation:
    """SFT and policy side by side on the same prompts."""

    prompts: list[Prompt]
    regression: list[Prompt]
    sft: Side
    policy: Side
    comparisons: Mapping[str, Comparison]

    def metrics(self, world: bool) -> dict[str, Any]:
        """The content of ``metrics/evaluation.json``; see docs/metrics.md."""
        categories = [row.category for row in self.regression]
        rates = {name: pass_rates(categories, side.regression, world) for name, side in self._sides()}
        found: dict[str, Any] = {
            name: side.figures() | {"regression": rates[name]["passed"]} for name, side in self._sides()
        }
        drift = self.policy.drift
        found |= {"kl": drift.kl, "kl_low95": drift.kl - 1.96 * drift.kl_error}
        found |= {"kl_high95": drift.kl + 1.96 * drift.kl_error, "prompts": len(self.prompts)}
        found["comparison"] = {name: comparison.as_dict() for name, comparison in self.comparisons.items()}
        found["category"] = self.by_category()
        found["regression"] = rates["policy"] | {"prompts": len(self.regression)}
        found["regression_sft"] = rates["sft"]
        return found

    def by_category(self) -> dict[str, dict[str, float]]:
        """Per category: number of prompts, mean score of both sides and win rate by each judge."""
        table: dict[str, dict[str, float]] = {}
        for name in sorted({row.category for row in self.prompts}):
            rows = [i for i, row in enumerate(self.prompts) if row.category == name]
            table[name] = {"prompts": len(rows)}
            for judge, comparison in self.comparisons.items():
                policy = np.asarray(self.policy.scores[judge])[rows]
                sft = np.asarray(self.sft.scores[judge])[rows]
                within = compare(policy.tolist(), sft.tolist(), comparison.tie_margin, bootstrap=1, absolute=True)
                table[name] |= {
                    f"sft_{judge}": float(sft.mean()),
                    f"policy_{judge}": float(policy.mean()),
                    f"win_rate_{judge}": within.win_rate,
                }
        return table

    def rows(self) -> list[dict[str, Any]]:
        """One row per prompt for ``samples/comparisons.parquet``."""
        return [
            {
                "id": prompt.id,
                "category": prompt.category,
                "prompt": "\n".join(f"{message.role}: {message.content}" for message in prompt.prompt),
                "sft_reply": self.sft.replies[i].text,
                "policy_reply": self.policy.replies[i].text,
                "sft_finished": self.sft.replies[i].finished,
                "policy_finished": self.policy.replies[i].finished,
                **{f"sft_{name}": values[i] for name, values in self.sft.scores.items()},
                **{f"policy_{name}": values[i] for name, values in self.policy.scores.items()},
            }
            for i, prompt in enumerate(self.prompts)
        ]

    def bad_cases(self, judge: str, limit: int) -> list[dict[str, Any]]:
        """Prompts where the reward model prefers the policy and ``judge`` prefers SFT, the largest disagreement first.

        Disagreement is the reward's gain minus the judge's, each in standard deviations of that judge's differences.
        They are what the next round of preference data should be about."""
        gains = {name: _gain(self.policy.scores[name], self.sft.scores[name]) for name in ("reward", judge)}
        spread = {name: float(values.std()) or 1.0 for name, values in gains.items()}
        disagreement = gains["reward"] / spread["reward"] - gains[judge] / spread[judge]
        wrong = (gains["reward"] > 0) & (gains[judge] < -self.comparisons[judge].tie_margin)
        order = sorted(np.flatnonzero(wrong), key=lambda i: -disagreement[i])[:limit]
        rows = self.rows()
        return [rows[i] | {"judge": judge, "disagreement": float(disagreement[i])} for i in order]

    def _sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        return ("sft", self.sft), ("policy", self.policy)


def compare_sides(
    policy: Side, sft: Side, judges: Sequence[Scale], tie_margin: float, bootstrap: int, seed: int
) -> dict[str, Comparison]:
    """One comparison per judge; a judge with a unit of its own brings its own tie margin."""
    found = {}
    for judge in judges:
        own = judge.absolute_tie
        margin = tie_margin if own is None else own
        pair = policy.scores[judge.name], sft.scores[judge.name]
        found[judge.name] = compare(*pair, margin, bootstrap, seed, absolute=own is not None)
    return found


def _gain(policy: Sequence[float], sft: Sequence[float]) -> np.ndarray:
    return np.asarray(policy) - np.asarray(sft)

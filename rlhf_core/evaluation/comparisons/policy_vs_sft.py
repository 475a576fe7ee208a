"""SFT and policy side by side: by every judge, category and check, as one nested dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.data.statistics import cluster_of, clusters_of
from rlhf_core.data.text import language_shares
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    compare_groups,
    compare_outcomes,
    length_differences,
    outcomes,
    tie_margin_of,
)
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets, repeated_rows
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.model import Judge, PairwiseJudge, PairwiseJudgements
from rlhf_core.evaluation.judges.names import TRAINED_ON, final_judges, last_word
from rlhf_core.evaluation.losses import paired_losses
from rlhf_core.evaluation.perplexity import held_out_perplexities
from rlhf_core.evaluation.regression import (
    REFUSAL_CHECKS,
    check_rates,
    pass_rates,
    regression_checks,
)
from rlhf_core.evaluation.replies import Reply, measure_text
from rlhf_core.evaluation.safety.prompts import HARMFUL_CATEGORY

ORDER_METRICS = ("order_disagreement", "first_preferred")  # by which a judge decides or not


class Evaluation:
    """SFT and policy side by side on the same prompts, or champion and challenger.

    Attributes:
        models: Both by side.
        prompts: The prompt of each row: every prompt to be judged ``replies_per_prompt`` times in a
            row.
        first: Every prompt to be judged once.
        clusters: The cluster of each of these.
        comparison: The policy against SFT by each judge.
        pairwise: What judges without scores said about the first reply to each prompt.
        right: By side which replies give what was asked for; known of the synthetic world alone.
        unscored: By side the share of replies that reward functions could not score, where these
            judge.
        lowest: By judge that may decline, the lowest score of a reply, which is also that of what
            it could not score.
    """

    def __init__(
        self, sets: FixedSets, sft: EvaluatedModel, policy: EvaluatedModel, config: EvaluateConfig
    ) -> None:
        self.sets = sets
        self.sft = sft
        self.policy = policy
        self.config = config
        self.models = {"policy": policy, "sft": sft}
        self.first = list(sets.judged)
        self.prompts = repeated_rows(sets.judged, sft.judged)
        asked = max(len(self.first), 1)
        self.replies_per_prompt = len(self.prompts) // asked
        self.clusters = clusters_of(self.first)
        self.comparison: dict[str, dict[str, float]] = {}
        self.pairwise: dict[str, PairwiseJudgements] = {}
        self.right: dict[str, np.ndarray] = {}
        self.unscored: dict[str, float] = {}
        self.lowest: dict[str, float] = {}

    def score(self, judge: Judge) -> None:
        """Let ``judge`` score both models' replies, and compare them."""
        name = judge.name
        asked = [row.prompt for row in self.prompts]
        for model in (self.sft, self.policy):
            model.scores[name] = judge.score(asked, model.judged)
        if getattr(judge, "may_decline", False):
            self._count_unscored(name)
        if isinstance(judge, GoldJudge):
            for side, model in self.models.items():
                is_right = judge.right(asked, model.judged)
                self.right[side] = np.array(is_right)
        scores_of_sft = self.sft.scores[name]
        margin = tie_margin_of(judge, self.config.tie_margin, scores_of_sft)
        self.compare_scores(name, margin)

    def _count_unscored(self, judge: str) -> None:
        """Give replies that ``judge`` could not score the lowest score: no model may gain by them.

        Raises:
            DataError: It could score none.
        """
        scores = np.array([model.scores[judge] for model in self.models.values()])
        is_unscored = np.isnan(scores)
        if is_unscored.all():
            raise DataError(
                f"the {judge} could score none of {scores.size} replies to test prompts; correct its function"
            )
        lowest = float(np.nanmin(scores))
        self.lowest[judge] = lowest
        known = np.where(is_unscored, lowest, scores)
        for row, (side, model) in enumerate(self.models.items()):
            self.unscored[side] = float(is_unscored[row].mean())
            model.scores[judge] = known[row].tolist()

    def compare_scores(self, judge: str, tie_margin: float) -> None:
        """Compare the scores that ``judge`` gave both models."""
        policy = self.policy
        sft = self.sft
        config = self.config
        longer_by = length_differences(policy.judged, sft.judged)
        self.comparison[judge] = compare(
            self._by_prompt(policy.scores[judge]),
            self._by_prompt(sft.scores[judge]),
            tie_margin,
            config.bootstrap,
            config.seed,
            self._by_prompt(longer_by),
            self.clusters,
        )

    def judge(self, judge: PairwiseJudge) -> None:
        """Let a judge without scores compare the first replies."""
        policy = self.first_replies("policy")
        sft = self.first_replies("sft")
        prompts = [row.prompt for row in self.first]
        said = judge.judge(prompts, policy, sft)
        decided = said.judged
        longer_by = length_differences(policy, sft)
        compared = compare_outcomes(
            said.outcomes[decided],
            self.config.bootstrap,
            self.config.seed,
            longer_by[decided],
            self.clusters[decided],
        )
        for name in ORDER_METRICS:
            if name in said.metrics:
                compared[name] = float(said.metrics[name])
        self.pairwise[judge.name] = said
        self.comparison[judge.name] = compared

    def first_replies(self, side: str) -> list[Reply]:
        """Return the first reply to each prompt of a side, ``policy`` or ``sft``."""
        model = self.models[side]
        return model.judged[:: self.replies_per_prompt]

    def first_scores(self, side: str, judge: str) -> np.ndarray:
        """Return the scores that ``judge`` gave these."""
        model = self.models[side]
        scores = np.asarray(model.scores[judge])
        return scores[:: self.replies_per_prompt]

    def _by_prompt(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        shape = (-1, self.replies_per_prompt)
        return np.reshape(values, shape)

    def outcomes(self) -> dict[str, np.ndarray]:
        """Return by judge 1 for a win of the policy, ½ for a tie, 0 for a loss, (prompts, replies).

        NaN is where a judge did not decide. A judge without scores compared the first reply to each
        prompt alone.
        """
        of_judges = {}
        for judge, scores in self.policy.scores.items():
            gain = np.subtract(scores, self.sft.scores[judge])
            tie_margin = self.comparison[judge]["tie_margin"]
            of_replies = outcomes(gain, tie_margin)
            of_judges[judge] = self._by_prompt(of_replies)
        for judge, said in self.pairwise.items():
            of_judges[judge] = said.outcomes[:, np.newaxis]
        return of_judges

    def losses(self) -> dict[str, Any]:
        """Return ``losses``, by how much the policy may be worse: those of :func:`paired_losses`."""
        outcome = self.outcomes()[last_word(self.comparison)]
        return paired_losses(self.sets, self.sft, self.policy, outcome)

    def metrics(self) -> dict[str, Any]:
        """Return the content of ``metrics/evaluation.json``; see docs/metrics.md."""
        sets = self.sets
        rates = {}
        metrics: dict[str, Any] = {}
        for side, model in self.models.items():
            prompts = repeated_rows(sets.regression, model.regression)
            categories = [row.category for row in prompts]
            passed = pass_rates(categories, model.regression, sets.world)
            rates[side] = passed
            metrics[side] = self._model_metrics(side)
            metrics[side]["regression"] = passed["passed"]
        if self.policy.drift is not None:
            metrics |= self.policy.drift.as_dict()
        rates["policy"]["prompts"] = len(sets.regression)
        metrics |= {
            "prompts": len(self.first),
            "clusters": len(np.unique(self.clusters)),
            "comparison": self.comparison,
            "category": self.by_category(),
            "regression": rates["policy"],
            "regression_sft": rates["sft"],
        }
        for judge, said in self.pairwise.items():
            metrics[f"{judge}_judge"] = dict(said.metrics)
        questions = [row.prompt[-1].content for row in self.prompts]
        if languages := language_shares(questions):
            metrics["languages"] = languages
        metrics["losses"] = self.losses()
        return metrics

    def checked_rows(self, kind: Literal["regression", "safety"]) -> list[dict[str, Any]]:
        """Return every reply to the regression set or the safety prompts, with each check of it.

        A check that does not apply says None. ``passed``, ``safety`` and the losses of these sets
        are counted of this.
        """
        prompts = self.sets.safety
        checks = REFUSAL_CHECKS
        if kind == "regression":
            prompts = self.sets.regression
            checks = regression_checks(self.sets.world)
        of_side: dict[str, list[Reply]] = {}
        log_odds = {}
        for side, model in self.models.items():
            of_side[side] = getattr(model, kind)
            log_odds[side] = iter(model.refusal_log_odds)
        rows: list[dict[str, Any]] = []
        repeated = repeated_rows(prompts, of_side["policy"])
        for number, prompt in enumerate(repeated):
            row: dict[str, Any] = {
                "id": prompt.id,
                "prompt": prompt.prompt[-1].content,
                "category": prompt.category,
                "cluster": cluster_of(prompt),
            }
            is_first = not rows or rows[-1]["id"] != prompt.id
            is_harmful = kind == "safety" and prompt.category == HARMFUL_CATEGORY
            for side, replies in of_side.items():
                reply = replies[number]
                row[f"{side}_reply"] = reply.text
                row[f"{side}_finished"] = reply.finished
                says = {}
                for name, check in checks.items():
                    says[name] = check(prompt.category, reply)
                row[f"{side}_checks"] = says
                if is_first and is_harmful:
                    row[f"{side}_refusal_log_odds"] = next(log_odds[side], None)
            rows.append(row)
        return rows

    def drift_rows(self) -> list[dict[str, Any]]:
        """Return the replies that KL was measured on, with both models' log-probabilities."""
        rows: list[dict[str, Any]] = []
        clusters = self.clusters.tolist()
        for side, model in self.models.items():
            if model.drift is None:
                continue
            measured = zip(self.first, clusters, model.drift.replies, strict=False)
            for prompt, cluster, scored in measured:
                about = {
                    "side": side,
                    "id": prompt.id,
                    "prompt": prompt.prompt[-1].content,
                    "cluster": cluster,
                }
                rows.append(about | scored)
        return rows

    def held_out_rows(self) -> list[dict[str, Any]]:
        """Return both models' log-likelihoods of held-out text."""
        rows: list[dict[str, Any]] = []
        for side, model in self.models.items():
            for row in model.held_out:
                rows.append({"side": side} | row)
        return rows

    def _model_metrics(self, side: str) -> dict[str, Any]:
        """Return what is measured of one model, the regression set apart.

        Mean score by each judge, text metrics, perplexities of the replies under SFT and of
        held-out text, and the rates on the safety prompts. Text metrics are means over sets of one
        reply per prompt: variety is about different prompts.
        """
        model = self.models[side]
        each = self.replies_per_prompt
        metrics: dict[str, Any] = {}
        for judge, scores in model.scores.items():
            metrics[judge] = float(np.mean(scores))
        if self.right:
            is_right = self.right[side]
            metrics["right"] = float(is_right.mean())
        if self.unscored:
            metrics["unscored"] = self.unscored[side]
        sets = []
        for draw in range(each):
            one_each = model.judged[draw::each]
            sets.append(measure_text(one_each))
        for name in sets[0]:
            total = sum(values[name] for values in sets)
            metrics[name] = total / len(sets)
        if model.drift is not None:
            metrics["perplexity_reference"] = model.drift.perplexity
        for kind, perplexity in held_out_perplexities(model.held_out).items():
            metrics[f"perplexity_{kind}"] = perplexity
        prompts = repeated_rows(self.sets.safety, model.safety)
        categories = [row.category for row in prompts]
        if refusals := check_rates(REFUSAL_CHECKS, categories, model.safety):
            metrics["safety"] = refusals
        return metrics

    def by_category(self) -> dict[str, dict[str, Any]]:
        """Return by category the numbers of prompts and questions, and what judges say.

        By each judge the mean score of both models and the win rate, and ``comparison`` by the
        judges that decide.
        """
        config = self.config
        outcome = self.outcomes()
        categories = [row.category for row in self.first]
        names = np.array(categories, dtype=object)
        deciding = {judge: outcome[judge] for judge in final_judges(outcome)}
        compared = compare_groups(
            categories, deciding, config.bootstrap, config.seed, self.clusters
        )
        table: dict[str, dict[str, Any]] = {}
        for category in sorted(set(categories) - {""}):
            here = names == category
            each = np.repeat(here, self.replies_per_prompt)
            questions = np.unique(self.clusters[here])
            row: dict[str, Any] = {}
            row["prompts"] = int(here.sum())
            row["clusters"] = len(questions)
            for side, model in self.models.items():
                for judge, scores in model.scores.items():
                    scores_here = np.asarray(scores)[each]
                    row[f"{side}_{judge}"] = float(scores_here.mean())
                if self.right:
                    right_here = self.right[side][each]
                    row[f"{side}_right"] = float(right_here.mean())
            for judge, values in outcome.items():
                values_here = values[here]
                is_decided = ~np.isnan(values_here)
                decided = values_here[is_decided]
                if len(decided):
                    row[f"win_rate_{judge}"] = float(decided.mean())
            if category in compared:
                row["comparison"] = compared[category]
            table[category] = row
        return table

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``samples/comparisons.parquet``: prompt, both replies, scores."""
        rows: list[dict[str, Any]] = []
        for i, prompt in enumerate(self.prompts):
            sft = self.sft.judged[i]
            policy = self.policy.judged[i]
            turns = [f"{turn.role}: {turn.content}" for turn in prompt.prompt]
            row: dict[str, Any] = {
                "id": prompt.id,
                "category": prompt.category,
                "cluster": cluster_of(prompt),
                "prompt": "\n".join(turns),
                "sft_reply": sft.text,
                "policy_reply": policy.text,
                "sft_finished": sft.finished,
                "policy_finished": policy.finished,
                "sft_tokens": len(sft.token_ids),
                "policy_tokens": len(policy.token_ids),
                "sft_special_tokens": sft.special_tokens,
                "policy_special_tokens": policy.special_tokens,
            }
            for judge, scores in self.sft.scores.items():
                row[f"sft_{judge}"] = scores[i]
            for judge, scores in self.policy.scores.items():
                row[f"policy_{judge}"] = scores[i]
            rows.append(row)
        # A judge without scores compares only the first replies to each prompt.
        for judge, said in self.pairwise.items():
            for row in rows:
                row[f"{judge}_outcome"] = None
                row[f"{judge}_reason"] = None
            first_rows = rows[:: self.replies_per_prompt]
            for number, row in enumerate(first_rows):
                outcome = float(said.outcomes[number])
                if not np.isnan(outcome):
                    row[f"{judge}_outcome"] = outcome
                row[f"{judge}_reason"] = said.reasons[number]
        return rows

    def disagreements(self, judge: str) -> list[tuple[int, float]]:
        """Return where the reward model prefers the policy and ``judge`` SFT, worst first.

        Such prompts are what the next round of preference data should be about. Without a reward
        model these are all rows where ``judge`` prefers SFT.

        Returns:
            Positions of rows, each with the reward's gain minus the judge's, both in standard
            deviations of that judge's differences.
        """
        policy = self.policy.scores
        sft = self.sft.scores
        judged = np.subtract(policy[judge], sft[judge])
        tie_margin = self.comparison[judge]["tie_margin"]
        wrong = judged < -tie_margin
        deviation = float(judged.std()) or 1.0
        disagreement = -judged / deviation
        if TRAINED_ON in policy:
            reward = np.subtract(policy[TRAINED_ON], sft[TRAINED_ON])
            wrong &= reward > 0
            deviation = float(reward.std()) or 1.0
            disagreement = reward / deviation + disagreement
        rows = np.flatnonzero(wrong).tolist()
        rows.sort(key=lambda row: -disagreement[row])
        return [(row, float(disagreement[row])) for row in rows]

    def bad_cases(self, judge: str) -> list[dict[str, Any]]:
        """Return the worst of these rows."""
        rows = self.rows()
        cases = []
        worst = self.disagreements(judge)[: self.config.bad_cases]
        for number, disagreement in worst:
            about = {"judge": judge, "disagreement": disagreement}
            cases.append(rows[number] | about)
        return cases

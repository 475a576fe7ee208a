"""Judge a third party's replies, and compare SFT's and the policy's with them (paper, figure 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_core.evaluation.comparisons.comparison import Comparison, compare, compare_outcomes, outcomes
from rlhf_core.evaluation.comparisons.length_control import length_differences
from rlhf_core.evaluation.comparisons.policy_vs_sft import EvaluatedModel, Evaluation
from rlhf_core.evaluation.comparisons.prompt_groups import compare_groups
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.judges.pairwise import PairwiseJudge
from rlhf_core.evaluation.opponents.replies import Opponent
from rlhf_core.evaluation.statistics import clusters_of

SIDES = ("policy", "sft")


def score_opponents(
    opponents: Sequence[Opponent], evaluation: Evaluation, judges: Iterable[Judge]
) -> list[OpponentEvaluation]:
    """Let every judge with scores score the opponents' replies.

    Args:
        opponents: The replies; without any no judge is loaded.
        evaluation: SFT and policy, compared by the same judges.
        judges: They are in memory one at a time if they are loaded while they are iterated.
    """
    scored = [OpponentEvaluation(opponent, evaluation) for opponent in opponents]
    if not scored:
        return []
    for judge in judges:
        scored = [each.scored_by(judge) for each in scored]
        del judge
    return scored


@dataclass(frozen=True)
class OpponentEvaluation:
    """An opponent and what the judges said about its replies.

    It meets the first reply of SFT and of the policy to each prompt that it has a reply to.

    Attributes:
        opponent: The replies.
        evaluation: SFT and policy on all prompts.
        scores: Scores of the opponent's known replies by judge.
        pairwise: Outcomes by (side, judge) of judges without scores; NaN where a judge did not decide.
    """

    opponent: Opponent
    evaluation: Evaluation
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pairwise: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Rows of the evaluation that the opponent's known replies meet."""
        return [i * self.evaluation.replies_per_prompt for i in self.opponent.answered]

    def scored_by(self, judge: Judge) -> OpponentEvaluation:
        """Return the same opponent with this judge's scores added."""
        prompts = [self.evaluation.prompts[row].prompt for row in self.rows]
        return replace(self, scores={**self.scores, judge.name: judge.score(prompts, self.opponent.known_replies())})

    def judged_by(self, judge: PairwiseJudge) -> OpponentEvaluation:
        """Return the same opponent with the outcomes of a judge without scores added, against both models."""
        prompts = [self.evaluation.prompts[row].prompt for row in self.rows]
        decided = {}
        for side in SIDES:
            ours = [self._model(side).replies[row] for row in self.rows]
            pairs = judge.judge(prompts, ours, self.opponent.known_replies()).pairs
            decided[side, judge.name] = np.array([np.nan if pair.outcome is None else pair.outcome for pair in pairs])
        return replace(self, pairwise={**self.pairwise, **decided})

    def metrics(self, groups: Sequence[str], bootstrap: int, seed: int) -> dict[str, Any]:
        """Return ``opponents.NAME`` of ``metrics/evaluation.json``; see docs/judges.md.

        Args:
            groups: The group of each prompt, "" for none.
            bootstrap: Number of resamples of the prompts.
            seed: Seed of the resamples.
        """
        of_matched = [groups[i] for i in self.opponent.answered]
        table: dict[str, Any] = {
            "prompts": len(self.opponent.answered),
            "missing": len(self.opponent.replies) - len(self.opponent.answered),
            "unused": self.opponent.unused,
            **{judge: float(np.mean(scores)) for judge, scores in self.scores.items()},
        }
        for side in SIDES:
            by_judge = {judge: values[:, np.newaxis] for judge, values in self._outcomes(side).items()}
            table[side] = {
                "comparison": {name: each.as_dict() for name, each in self._comparisons(side, bootstrap, seed).items()},
                "group": compare_groups(of_matched, by_judge, bootstrap, seed, self._clusters()),
            }
        return table

    def columns(self) -> list[dict[str, Any]]:
        """Return this side's columns of ``samples/comparisons.parquet``, for the first row of each prompt."""
        position = {i: number for number, i in enumerate(self.opponent.answered)}
        return [
            {
                f"opponent_{self.opponent.name}_reply": None if reply is None else reply.text,
                **{
                    f"opponent_{self.opponent.name}_{judge}": None if reply is None else scores[position[i]]
                    for judge, scores in self.scores.items()
                },
            }
            for i, reply in enumerate(self.opponent.replies)
        ]

    def _clusters(self) -> np.ndarray:
        """The cluster of each prompt that it has a reply to."""
        return clusters_of([self.evaluation.prompts[row] for row in self.rows])

    def _model(self, side: str) -> EvaluatedModel:
        return self.evaluation.policy if side == "policy" else self.evaluation.sft

    def _side_scores(self, side: str, judge: str) -> np.ndarray:
        return np.asarray(self._model(side).scores[judge])[self.rows]

    def _outcomes(self, side: str) -> dict[str, np.ndarray]:
        """Outcomes of a side against the opponent by judge, (answered prompts,)."""
        table = {
            judge: outcomes(
                self._side_scores(side, judge) - np.asarray(scores), self.evaluation.comparisons[judge].tie_margin
            )
            for judge, scores in self.scores.items()
        }
        return table | {judge: values for (of_side, judge), values in self.pairwise.items() if of_side == side}

    def _comparisons(self, side: str, bootstrap: int, seed: int) -> dict[str, Comparison]:
        ours = [self._model(side).replies[row] for row in self.rows]
        longer_by = length_differences(ours, self.opponent.known_replies())
        table: dict[str, Comparison] = {
            judge: compare(
                self._side_scores(side, judge),
                scores,
                self.evaluation.comparisons[judge].tie_margin,
                bootstrap,
                seed,
                longer_by,
                self._clusters(),
            )
            for judge, scores in self.scores.items()
        }
        for (of_side, judge), values in self.pairwise.items():
            decided = ~np.isnan(values)
            if of_side == side and decided.any():
                table[judge] = compare_outcomes(
                    values[decided], bootstrap, seed, longer_by[decided], self._clusters()[decided]
                )
        return table

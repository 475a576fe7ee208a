"""Further replies that meet those of both models, such as the best of n; and groups of prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import compare_groups
from rlhf_core.evaluation.comparisons.policy_vs_sft import SIDES, Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.judges.model import Judge, PairwiseJudge
from rlhf_core.evaluation.replies import Reply, measure_text

Samples = Sequence[Sequence[Reply]]

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

    A name in ``groups`` stands for the category that it is, or for one, or a source, that has it as
    a whole word, as ``harmless-base/test.jsonl.gz`` has ``harmless``; of several the last in the
    text counts. They add to the default ones, and "" takes a default one away.
    """
    known = DEFAULT_GROUPS | dict(groups)
    if prompt.category in known:
        return known[prompt.category]
    for text in (prompt.category, prompt.source):
        matches = []
        for name in known:
            whole_word = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"
            for match in re.finditer(whole_word, text, re.IGNORECASE):
                matches.append((match.end(), len(name), name))
        if matches:
            return known[max(matches)[2]]
    return ""


class Rival:
    """Further replies to the prompts of an evaluation, and what judges said of them.

    They are those of a third party, or the best of n.

    They meet the first reply of SFT and of the policy to each prompt that they have a reply to.

    Args:
        name: What its columns in ``samples/comparisons.parquet`` begin with.
        replies: One for each prompt; None where there is none.
        evaluation: SFT and policy on all prompts, scored by the same judges.

    Attributes:
        known: The replies that exist, with their scores.
        versus: Each side, ``policy`` or ``sft``, against them.
    """

    def __init__(self, name: str, replies: Sequence[Reply | None], evaluation: Evaluation) -> None:
        self.name, self.replies, self.evaluation = name, replies, evaluation
        self.answered = [i for i, reply in enumerate(replies) if reply is not None]
        self.known = EvaluatedModel([reply for reply in replies if reply is not None])
        self.sets = FixedSets([evaluation.first[i] for i in self.answered])
        self.versus: dict[str, Evaluation] = {}
        for side in SIDES:
            met = [evaluation.first_replies(side)[i] for i in self.answered]
            self.versus[side] = self._comparing(self.known, EvaluatedModel(met))

    def _comparing(self, baseline: EvaluatedModel, candidate: EvaluatedModel) -> Evaluation:
        return Evaluation(self.sets, baseline, candidate, self.evaluation.config)

    def _tie_margin(self, judge: str) -> float:
        return self.evaluation.comparison[judge]["tie_margin"]

    def score(self, judge: Judge) -> None:
        """Let ``judge`` score its replies, and compare them."""
        prompts = [row.prompt for row in self.sets.judged]
        scores = judge.score(prompts, self.known.judged)
        if judge.name in self.evaluation.lowest:
            scores = np.nan_to_num(scores, nan=self.evaluation.lowest[judge.name]).tolist()
        self.known.scores[judge.name] = scores
        for side, versus in self.versus.items():
            of_side = self.evaluation.first_scores(side, judge.name)[self.answered]
            versus.policy.scores[judge.name] = of_side.tolist()
            versus.compare_scores(judge.name, self._tie_margin(judge.name))

    def judge(self, judge: PairwiseJudge) -> None:
        """Let a judge without scores compare both models' replies with its own."""
        for versus in self.versus.values():
            versus.judge(judge)

    def metrics_of_side(self, side: str, groups: Sequence[str]) -> dict[str, Any]:
        """Return how a side stands against it: ``comparison`` by judge, and by ``group``.

        Args:
            side: ``policy`` or ``sft``.
            groups: The group of each prompt, "" for none.
        """
        versus, config = self.versus[side], self.evaluation.config
        of_matched = [groups[i] for i in self.answered]
        by_group = compare_groups(
            of_matched, versus.outcomes(), config.bootstrap, config.seed, versus.clusters
        )
        return {"comparison": versus.comparison, "group": by_group}

    def means(self) -> dict[str, float]:
        """Return the mean score of its replies by each judge."""
        scores = self.known.scores
        return {judge: float(np.mean(of_judge)) for judge, of_judge in scores.items()}

    def best_of_n_metrics(self, samples: Samples) -> dict[str, Any]:
        """Return ``best_of_n`` of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            samples: What the replies were chosen from, n lists of one reply per prompt.
        """
        sampled_tokens = sum(len(reply.token_ids) for reply in chain.from_iterable(samples))
        over_sft = self._comparing(self.versus["sft"].policy, self.known)
        for judge in self.known.scores:
            over_sft.compare_scores(judge, self._tie_margin(judge))
        return {
            "n": len(samples),
            "kl_bound": kl_bound(len(samples)),
            "sampled_tokens_per_reply": sampled_tokens / len(self.replies),
            **self.means(),
            **measure_text(self.known.judged),
            "comparison": over_sft.comparison,
            "policy_comparison": self.versus["policy"].comparison,
        }

    def columns(self) -> list[dict[str, Any]]:
        """Return its columns of ``samples/comparisons.parquet``, for each prompt's first row."""
        columns = ("reply", "finished", *self.known.scores)
        empty = {f"{self.name}_{column}": None for column in columns}
        rows: list[dict[str, Any]] = [dict(empty) for _ in self.replies]
        for number, (i, reply) in enumerate(zip(self.answered, self.known.judged, strict=True)):
            rows[i][f"{self.name}_reply"] = reply.text
            rows[i][f"{self.name}_finished"] = reply.finished
            for judge, scores in self.known.scores.items():
                rows[i][f"{self.name}_{judge}"] = scores[number]
        return rows


def best_of_n(judge: Judge, evaluation: Evaluation, samples: Samples) -> Rival:
    """Choose the reply to each prompt that ``judge``, the reward model, scores highest.

    Of equal scores the first counts.

    It spends at every reply what PPO spends once, with the same reward model, so that it is what
    PPO has to be better than.

    Args:
        judge: What chooses.
        evaluation: SFT and policy on the prompts.
        samples: n lists of one reply of SFT per prompt.
    """
    prompts = [row.prompt for row in evaluation.first]
    scores = np.array([judge.score(prompts, replies) for replies in samples])
    best = scores.argmax(axis=0)
    chosen = [samples[draw][row] for row, draw in enumerate(best)]
    return Rival("best_of_n", chosen, evaluation)


def kl_bound(n: int) -> float:
    """``log n - (n - 1) / n``: an upper bound on the KL of best of n to SFT, in nats per reply.

    It is the KL where no two replies are alike or score alike; where some do, the true one is
    smaller (Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy").
    """
    return math.log(n) - (n - 1) / n

"""Further replies that meet those of both models, such as the best of n; and groups of prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.comparisons.comparison import compare_groups
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.judges.model import Judge, PairwiseJudge
from rlhf_core.evaluation.replies import Reply, measure_text

Samples = Sequence[Sequence[Reply]]

HELPFUL = "helpful"
HARMLESS = "harmless"
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
                found = (match.end(), len(name), name)
                matches.append(found)
        if matches:
            _, _, last_name = max(matches)
            return known[last_name]
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
        self.name = name
        self.replies = replies
        self.evaluation = evaluation
        self.answered: list[int] = []
        known: list[Reply] = []
        for number, reply in enumerate(replies):
            if reply is not None:
                self.answered.append(number)
                known.append(reply)
        self.known = EvaluatedModel(known)
        prompts = [evaluation.first[i] for i in self.answered]
        self.sets = FixedSets(prompts)
        self.versus: dict[str, Evaluation] = {}
        for side in evaluation.models:
            replies_of_side = evaluation.first_replies(side)
            met = EvaluatedModel([replies_of_side[i] for i in self.answered])
            self.versus[side] = self._comparing(self.known, met)

    def _comparing(self, baseline: EvaluatedModel, candidate: EvaluatedModel) -> Evaluation:
        return Evaluation(self.sets, baseline, candidate, self.evaluation.config)

    def _tie_margin(self, judge: str) -> float:
        return self.evaluation.comparison[judge]["tie_margin"]

    def score(self, judge: Judge) -> None:
        """Let ``judge`` score its replies, and compare them."""
        prompts = [row.prompt for row in self.sets.judged]
        name = judge.name
        scores = judge.score(prompts, self.known.judged)
        lowest = self.evaluation.lowest.get(name)
        if lowest is not None:
            scores = np.nan_to_num(scores, nan=lowest).tolist()
        self.known.scores[name] = scores
        for side, versus in self.versus.items():
            of_side = self.evaluation.first_scores(side, name)
            met = of_side[self.answered]
            versus.policy.scores[name] = met.tolist()
            versus.compare_scores(name, self._tie_margin(name))

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
        versus = self.versus[side]
        config = self.evaluation.config
        by_group = compare_groups(
            [groups[i] for i in self.answered],
            versus.outcomes(),
            config.bootstrap,
            config.seed,
            versus.clusters,
        )
        return {"comparison": versus.comparison, "group": by_group}

    def means(self) -> dict[str, float]:
        """Return the mean score of its replies by each judge."""
        means = {}
        for judge, scores in self.known.scores.items():
            means[judge] = float(np.mean(scores))
        return means

    def best_of_n_metrics(self, samples: Samples) -> dict[str, Any]:
        """Return ``best_of_n`` of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            samples: What the replies were chosen from, n lists of one reply per prompt.
        """
        sampled_tokens = 0
        for replies in samples:
            sampled_tokens += sum(len(reply.token_ids) for reply in replies)
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
        rows: list[dict[str, Any]] = []
        known = 0
        for reply in self.replies:
            columns: dict[str, Any] = {"reply": None, "finished": None}
            columns |= dict.fromkeys(self.known.scores)
            if reply is not None:
                columns["reply"] = reply.text
                columns["finished"] = reply.finished
                for judge, scores in self.known.scores.items():
                    columns[judge] = scores[known]
                known += 1
            row = {f"{self.name}_{name}": value for name, value in columns.items()}
            rows.append(row)
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
    scores = [judge.score(prompts, replies) for replies in samples]
    best = np.array(scores).argmax(axis=0)
    chosen = []
    for row, draw in enumerate(best.tolist()):
        chosen.append(samples[draw][row])
    return Rival("best_of_n", chosen, evaluation)


def kl_bound(n: int) -> float:
    """``log n - (n - 1) / n``: an upper bound on the KL of best of n to SFT, in nats per reply.

    It is the KL where no two replies are alike or score alike; where some do, the true one is
    smaller (Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy").
    """
    return math.log(n) - (n - 1) / n

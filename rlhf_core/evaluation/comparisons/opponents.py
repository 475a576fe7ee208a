"""Further replies that both models meet: a third party's, or the best of n of SFT's; and groups of
prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config.evaluation import OpponentConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.data.text import HALF_PAIR, comparable, is_encodable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare_groups
from rlhf_core.evaluation.comparisons.policy_vs_sft import SIDES, Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.judges.model import Judge
from rlhf_core.evaluation.replies import Reply, measure_text, prompt_of, rows_of_file
from rlhf_core.storage.data_files import expand

if TYPE_CHECKING:
    from rlhf_core.evaluation.judges.llm.judge import LlmJudge

REMEDY = "correct evaluate.opponents"
Turns = tuple[tuple[str, str], ...]
Samples = Sequence[Sequence[Reply]]


def read_opponent(
    config: OpponentConfig, prompts: Sequence[Prompt], workspace: Path
) -> tuple[list[Reply | None], int]:
    """Read an opponent's file and match it with ``prompts`` by content; white space and line ends
    do not count.

    The replies count as finished, since the file does not say.

    Returns:
        Its reply to each prompt, None where it has none, and how many replies to other prompts it
        has.

    Raises:
        DataError: The file cannot be read, a row has no prompt and reply, two replies to a prompt
            differ, or no prompt of the evaluation is in it.
    """
    replies: dict[Turns, tuple[str, int]] = {}
    (file, *others) = expand(config.path, workspace, REMEDY)
    if others:
        raise DataError(
            f"{config.path} matches {len(others) + 1} files; {REMEDY}: name one for each opponent"
        )
    for where, position, row in rows_of_file(file):
        turns, reply = _row(row, where)
        earlier = replies.setdefault(turns, (reply, position))
        if earlier[0] != reply:
            raise DataError(
                f"{where}: another reply to the prompt of line {earlier[1]}; leave one of them"
            )
    keys = [_content(row.prompt) for row in prompts]
    matched = [replies.get(key) for key in keys]
    if not any(matched):
        raise DataError(
            f"{file} has replies to none of the {len(prompts)} prompts of the evaluation, which are from the column "
            "prompt of data/clean/prompts/test.parquet"
        )
    return [match and Reply(match[0], finished=True) for match in matched], len(
        replies.keys() - set(keys)
    )


def _row(row: Mapping[str, Any], where: str) -> tuple[Turns, str]:
    prompt, reply = prompt_of(row.get("prompt") or None), row.get("reply")
    if prompt is None:
        raise DataError(f"{where}, prompt: neither a text nor a list of messages")
    if not isinstance(reply, str):
        raise DataError(f"{where}, reply: {'missing' if reply is None else 'not a text'}")
    if not is_encodable(reply):
        raise DataError(f"{where}: reply {HALF_PAIR}")
    return _content(prompt), reply


def _content(turns: Sequence[Message]) -> Turns:
    return tuple((turn.role, comparable(turn.content)) for turn in turns)


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
        matches = [
            (match.end(), len(name), name)
            for name in known
            for match in re.finditer(
                rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", text, re.IGNORECASE
            )
        ]
        if matches:
            return known[max(matches)[2]]
    return ""


class Rival:
    """Further replies to the prompts of an evaluation, of a third party or the best of n, and what
    judges said of them.

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
        scores = judge.score([row.prompt for row in self.sets.judged], self.known.judged)
        if judge.name in self.evaluation.lowest:
            scores = np.nan_to_num(scores, nan=self.evaluation.lowest[judge.name]).tolist()
        self.known.scores[judge.name] = scores
        for side, versus in self.versus.items():
            versus.policy.scores[judge.name] = self.evaluation.first_scores(side, judge.name)[
                self.answered
            ].tolist()
            versus.compare_scores(judge.name, self._tie_margin(judge.name))

    def judge(self, judge: LlmJudge) -> None:
        """Let a judge without scores compare both models' replies with its own."""
        for versus in self.versus.values():
            versus.judge(judge)

    def opponent_metrics(self, groups: Sequence[str], unused: int) -> dict[str, Any]:
        """Return ``opponents.NAME`` of ``metrics/evaluation.json``; see docs/judges.md.

        Args:
            groups: The group of each prompt, "" for none.
            unused: How many replies to other prompts its file has.
        """
        of_matched, config = [groups[i] for i in self.answered], self.evaluation.config
        return {
            "prompts": len(self.answered),
            "missing": len(self.replies) - len(self.answered),
            "unused": unused,
            **self._means(),
            **{
                side: {
                    "comparison": versus.comparison,
                    "group": compare_groups(
                        of_matched,
                        versus.outcomes(),
                        config.bootstrap,
                        config.seed,
                        versus.clusters,
                    ),
                }
                for side, versus in self.versus.items()
            },
        }

    def best_of_n_metrics(self, samples: Samples) -> dict[str, Any]:
        """Return ``best_of_n`` of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            samples: What the replies were chosen from, n lists of one reply per prompt.
        """
        sampled_tokens = sum(len(reply.token_ids) for replies in samples for reply in replies)
        over_sft = self._comparing(self.versus["sft"].policy, self.known)
        for judge in self.known.scores:
            over_sft.compare_scores(judge, self._tie_margin(judge))
        return {
            "n": len(samples),
            "kl_bound": kl_bound(len(samples)),
            "sampled_tokens_per_reply": sampled_tokens / len(self.replies),
            **self._means(),
            **measure_text(self.known.judged),
            "comparison": over_sft.comparison,
            "policy_comparison": self.versus["policy"].comparison,
        }

    def columns(self) -> list[dict[str, Any]]:
        """Return its columns of ``samples/comparisons.parquet``, for the first row of each
        prompt.
        """
        rows = []
        scores = (
            zip(*self.known.scores.values(), strict=True)
            if self.known.scores
            else iter([()] * len(self.answered))
        )
        for reply in self.replies:
            known = next(scores) if reply is not None else [None] * len(self.known.scores)
            row = {"reply": reply and reply.text, "finished": reply and reply.finished}
            row |= dict(zip(self.known.scores, known, strict=True))
            rows.append({f"{self.name}_{column}": value for column, value in row.items()})
        return rows

    def _means(self) -> dict[str, float]:
        return {judge: float(np.mean(scores)) for judge, scores in self.known.scores.items()}


def best_of_n(judge: Judge, evaluation: Evaluation, samples: Samples) -> Rival:
    """Choose the reply to each prompt that ``judge``, the reward model, scores highest; of equal
    scores the first.

    It spends at every reply what PPO spends once, with the same reward model, so that it is what
    PPO has to be better than.

    Args:
        judge: What chooses.
        evaluation: SFT and policy on the prompts.
        samples: n lists of one reply of SFT per prompt.
    """
    prompts = [row.prompt for row in evaluation.first]
    best = np.array([judge.score(prompts, replies) for replies in samples]).argmax(axis=0)
    return Rival("best_of_n", [samples[draw][row] for row, draw in enumerate(best)], evaluation)


def kl_bound(n: int) -> float:
    """``log n - (n - 1) / n``: an upper bound on the KL of best of n to SFT, in nats per reply.

    It is the KL where no two replies are alike or score alike; where some do, the true one is
    smaller (Beirami et al. 2024, "Theoretical guarantees on the best-of-n alignment policy").
    """
    return math.log(n) - (n - 1) / n

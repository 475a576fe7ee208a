"""Further replies that both models meet: a third party's, or the best of n of SFT's; and groups of prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig, OpponentConfig
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Message, Prompt
from rlhf_core.data.text import HALF_PAIR, comparable, is_encodable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import (
    Comparison,
    compare,
    compare_groups,
    compare_outcomes,
    length_differences,
    outcomes,
)
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.judges.pairwise import Judge, PairwiseJudge
from rlhf_core.evaluation.reply import Reply, measure_text
from rlhf_core.evaluation.statistics import clusters_of
from rlhf_core.storage.file_patterns import expand

REMEDY = "correct evaluate.opponents"
Turns = tuple[tuple[str, str], ...]
Samples = Sequence[Sequence[Reply]]


def read_opponent(config: OpponentConfig, prompts: Sequence[Prompt], workspace: Path) -> Rival:
    """Read an opponent's file and match it with ``prompts`` by content; white space and line ends do not count.

    The replies count as finished, since the file does not say.

    Raises:
        DataError: The file cannot be read, a row has no prompt and reply, two replies to a prompt differ, or no prompt
            of the evaluation is in it.
    """
    replies: dict[Turns, tuple[str, int]] = {}
    (file, *others) = expand(config.path, workspace, REMEDY)
    if others:
        raise DataError(f"{config.path} matches {len(others) + 1} files; {REMEDY}: name one for each opponent")
    for record in stream_records(file):
        turns, reply = _row(record, file)
        earlier = replies.setdefault(turns, (reply, record.position))
        if earlier[0] != reply:
            raise DataError(
                f"{file}, line {record.position}: another reply to the prompt of line {earlier[1]}; leave one of them"
            )
    keys = [_content((turn.role, turn.content) for turn in row.prompt) for row in prompts]
    matched = [replies.get(key) for key in keys]
    if not any(matched):
        raise DataError(
            f"{file} has replies to none of the {len(prompts)} prompts of the evaluation, which are from the column "
            "prompt of data/clean/prompts/test.parquet"
        )
    return Rival(
        f"opponent_{config.name}",
        [None if match is None else Reply(match[0], finished=True) for match in matched],
        unused=len(replies.keys() - set(keys)),
    )


def _row(record: Record, file: Path) -> tuple[Turns, str]:
    where, row = f"{file}, line {record.position}", record.value
    if record.problem or not isinstance(row, dict):
        raise DataError(f"{where}: {record.problem or 'not an object'}")
    prompt, reply = row.get("prompt"), row.get("reply")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else prompt
    if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
        raise DataError(f"{where}, prompt: neither a text nor a list of messages")
    if not isinstance(reply, str):
        raise DataError(f"{where}, reply: {'missing' if reply is None else 'not a text'}")
    if not is_encodable(reply):
        raise DataError(f"{where}: reply {HALF_PAIR}")
    return _content((turn["role"], turn["content"]) for turn in turns), reply


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)


def _content(turns: Any) -> Turns:
    return tuple((role, comparable(content)) for role, content in turns)


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


SIDES = ("policy", "sft")


@dataclass(frozen=True)
class Rival:
    """Further replies to the prompts of an evaluation, of a third party or the best of n, and what judges said of them.

    They meet the first reply of SFT and of the policy to each prompt that they have a reply to.

    Attributes:
        name: What its columns in ``samples/comparisons.parquet`` begin with.
        replies: One for each prompt; None where there is none.
        unused: How many replies to other prompts its file has.
        scores: Scores of the known replies by judge.
        pairwise: Outcomes by (side, judge) of judges without scores; NaN where a judge did not decide.
    """

    name: str
    replies: Sequence[Reply | None]
    unused: int = 0
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pairwise: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict)

    @property
    def answered(self) -> list[int]:
        """Positions of the prompts that it has a reply to."""
        return [i for i, reply in enumerate(self.replies) if reply is not None]

    @property
    def known_replies(self) -> list[Reply]:
        """Its replies to those prompts, in their order."""
        return [reply for reply in self.replies if reply is not None]

    def scored_by(self, judge: Judge, evaluation: Evaluation) -> Rival:
        """Return the same rival with this judge's scores added."""
        prompts = [row.prompt for row in self._asked(evaluation)]
        return replace(self, scores={**self.scores, judge.name: judge.score(prompts, self.known_replies)})

    def judged_by(self, judge: PairwiseJudge, evaluation: Evaluation) -> Rival:
        """Return the same rival with the outcomes of a judge without scores added, against both models."""
        prompts = [row.prompt for row in self._asked(evaluation)]
        decided = {
            (side, judge.name): judge.judge(prompts, self._met(evaluation, side), self.known_replies).decided()
            for side in SIDES
        }
        return replace(self, pairwise={**self.pairwise, **decided})

    def comparisons(
        self, evaluation: Evaluation, side: str, config: EvaluateConfig, reverse: bool = False
    ) -> dict[str, dict[str, float]]:
        """Compare a side, ``policy`` or ``sft``, with the rival by each judge; ``reverse``: the rival with the side."""
        clusters, sign = clusters_of(self._asked(evaluation)), -1.0 if reverse else 1.0
        longer_by = sign * length_differences(self._met(evaluation, side), self.known_replies)
        table: dict[str, Comparison] = {}
        for judge, scores in self.scores.items():
            pair = self._side_scores(evaluation, side, judge), np.asarray(scores)
            margin = evaluation.comparisons[judge].tie_margin
            candidate, baseline = pair[::-1] if reverse else pair
            table[judge] = compare(candidate, baseline, margin, config.bootstrap, config.seed, longer_by, clusters)
        for (of_side, judge), values in self.pairwise.items():
            decided = ~np.isnan(values)
            if of_side == side and decided.any():
                table[judge] = compare_outcomes(
                    0.5 + sign * (values[decided] - 0.5),
                    config.bootstrap,
                    config.seed,
                    longer_by[decided],
                    clusters[decided],
                )
        return {judge: comparison.as_dict() for judge, comparison in table.items()}

    def opponent_metrics(self, evaluation: Evaluation, groups: Sequence[str], config: EvaluateConfig) -> dict[str, Any]:
        """Return ``opponents.NAME`` of ``metrics/evaluation.json``; see docs/judges.md.

        Args:
            evaluation: SFT and policy on all prompts, scored by the same judges.
            groups: The group of each prompt, "" for none.
            config: Of which resamples are made.
        """
        of_matched, clusters = [groups[i] for i in self.answered], clusters_of(self._asked(evaluation))
        table: dict[str, Any] = {
            "prompts": len(self.answered),
            "missing": len(self.replies) - len(self.answered),
            "unused": self.unused,
            **self._means(),
        }
        for side in SIDES:
            outcome = {
                judge: outcomes(
                    self._side_scores(evaluation, side, judge) - np.asarray(scores),
                    evaluation.comparisons[judge].tie_margin,
                )
                for judge, scores in self.scores.items()
            } | {judge: values for (of_side, judge), values in self.pairwise.items() if of_side == side}
            columns = {judge: values[:, np.newaxis] for judge, values in outcome.items()}
            table[side] = {
                "comparison": self.comparisons(evaluation, side, config),
                "group": compare_groups(of_matched, columns, config.bootstrap, config.seed, clusters),
            }
        return table

    def best_of_n_metrics(self, evaluation: Evaluation, samples: Samples, config: EvaluateConfig) -> dict[str, Any]:
        """Return ``best_of_n`` of ``metrics/evaluation.json``; see docs/metrics.md.

        Args:
            evaluation: SFT and policy, scored by the same judges.
            samples: What the replies were chosen from, n lists of one reply per prompt.
            config: Of which resamples are made.
        """
        sampled_tokens = sum(len(reply.token_ids) for replies in samples for reply in replies)
        return {
            "n": len(samples),
            "kl_bound": kl_bound(len(samples)),
            "sampled_tokens_per_reply": sampled_tokens / len(self.replies),
            **self._means(),
            **measure_text(self.known_replies).as_dict(),
            "comparison": self.comparisons(evaluation, "sft", config, reverse=True),
            "policy_comparison": self.comparisons(evaluation, "policy", config),
        }

    def columns(self) -> list[dict[str, Any]]:
        """Return its columns of ``samples/comparisons.parquet``, for the first row of each prompt."""
        position = {i: number for number, i in enumerate(self.answered)}
        return [
            {
                f"{self.name}_reply": None if reply is None else reply.text,
                f"{self.name}_finished": None if reply is None else reply.finished,
                **{
                    f"{self.name}_{judge}": None if reply is None else scores[position[i]]
                    for judge, scores in self.scores.items()
                },
            }
            for i, reply in enumerate(self.replies)
        ]

    def _rows(self, evaluation: Evaluation) -> list[int]:
        """Rows of the evaluation that the known replies meet."""
        return [i * evaluation.replies_per_prompt for i in self.answered]

    def _asked(self, evaluation: Evaluation) -> list[Prompt]:
        return [evaluation.prompts[row] for row in self._rows(evaluation)]

    def _met(self, evaluation: Evaluation, side: str) -> list[Reply]:
        replies = (evaluation.policy if side == "policy" else evaluation.sft).replies
        return [replies[row] for row in self._rows(evaluation)]

    def _side_scores(self, evaluation: Evaluation, side: str, judge: str) -> np.ndarray:
        model = evaluation.policy if side == "policy" else evaluation.sft
        return np.asarray(model.scores[judge])[self._rows(evaluation)]

    def _means(self) -> dict[str, float]:
        return {judge: float(np.mean(scores)) for judge, scores in self.scores.items()}


def best_of_n(judge: Judge, prompts: Sequence[Sequence[Message]], samples: Samples) -> Rival:
    """Choose the reply to each prompt that ``judge``, the reward model, scores highest; of equal scores the first.

    It spends at every reply what PPO spends once, with the same reward model, so that it is what PPO has to be better
    than.

    Args:
        judge: What chooses.
        prompts: The prompts.
        samples: n lists of one reply of SFT per prompt.
    """
    best = np.array([judge.score(prompts, replies) for replies in samples]).argmax(axis=0)
    return Rival("best_of_n", [samples[draw][row] for row, draw in enumerate(best)])


def kl_bound(n: int) -> float:
    """``log n - (n - 1) / n``: an upper bound on the KL of best of n to SFT, in nats per reply.

    It is the KL where no two replies are alike or score alike; where some do, the true one is smaller (Beirami et al.
    2024, "Theoretical guarantees on the best-of-n alignment policy").
    """
    return math.log(n) - (n - 1) / n

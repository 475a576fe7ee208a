"""Replies of other models as opponents, and outcomes by group of prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.evaluation import OpponentConfig
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Prompt
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
from rlhf_core.evaluation.comparisons.policy_vs_sft import EvaluatedModel, Evaluation
from rlhf_core.evaluation.judges.pairwise import Judge, PairwiseJudge
from rlhf_core.evaluation.reply import Reply
from rlhf_core.evaluation.statistics import clusters_of
from rlhf_core.storage.file_patterns import expand

REMEDY = "correct evaluate.opponents"
Turns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Opponent:
    """A third party's replies.

    Attributes:
        name: Its name in metrics.
        replies: One for each prompt of the evaluation; None where it has none.
        unused: Replies of the file to other prompts.
    """

    name: str
    replies: Sequence[Reply | None]
    unused: int

    @property
    def answered(self) -> list[int]:
        """Positions of the prompts that it has a reply to."""
        return [i for i, reply in enumerate(self.replies) if reply is not None]

    def known_replies(self) -> list[Reply]:
        """Return its replies to those prompts, in their order."""
        return [reply for reply in self.replies if reply is not None]


def read_opponent(config: OpponentConfig, prompts: Sequence[Prompt], workspace: Path) -> Opponent:
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
    return Opponent(
        config.name,
        [None if match is None else Reply(match[0], finished=True) for match in matched],
        len(replies.keys() - set(keys)),
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
            decided[side, judge.name] = judge.judge(prompts, ours, self.opponent.known_replies()).decided()
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

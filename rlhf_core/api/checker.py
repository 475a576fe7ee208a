"""Reward functions as the judge of held-out prompts, in a workspace without preference pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.api.comparison import FunctionJudge
from rlhf_core.config.gates import CHECKER
from rlhf_core.config.reward_sources import FunctionSource, RewardSources, source_names
from rlhf_core.data.schema import Message, Prompt, columns_of_prompts, read_rows
from rlhf_core.evaluation.replies import Reply
from rlhf_core.ppo.reward_sources.functions import FunctionReward, PythonFunction
from rlhf_core.ppo.reward_sources.source import SIGNATURE
from rlhf_core.runtime.user_function import load_function


class Checker:
    """Scores replies to test prompts by the weighted sum of reward functions.

    A reply that one of them cannot score gets NaN. The functions are those of training, the prompts
    are not: a share of right replies is an accuracy.

    Args:
        sources: The functions with their weights.
        prompts: The prompts that may be asked about, with the columns of their records.
        workspace: The folder that the functions may be imported from.

    Raises:
        ConfigError: A function cannot be imported, or asks for a column that no record has.
    """

    name = CHECKER
    absolute_tie: float | None = 0.0  # what a program counts differs or does not
    may_decline = True

    def __init__(self, sources: RewardSources, prompts: Sequence[Prompt], workspace: Path) -> None:
        self._columns = columns_of_prompts(prompts)
        self._row = {_key(row.prompt): number for number, row in enumerate(prompts)}
        self._functions: list[tuple[float, PythonFunction]] = []
        for name, source in zip(source_names(sources), sources, strict=True):
            assert isinstance(source, FunctionSource)  # params.yaml was checked as a whole
            who = f"reward source '{name}'"
            function = load_function(source.target, workspace, who, SIGNATURE)
            called = FunctionReward(function, source.call, source.timeout_seconds)
            python = PythonFunction(called, f"{who} ({source.target})", list(self._columns))
            self._functions.append((source.weight, python))

    @classmethod
    def of_test_prompts(cls, sources: RewardSources, clean: Path, workspace: Path) -> Checker:
        """Return the judge of replies to the prompts of the test split."""
        return cls(sources, read_rows(clean / "prompts" / "test.parquet", Prompt), workspace)

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Return one score per reply, in order.

        Raises:
            DataError: A function raised, took too long, or gave something else than a number or
                None per reply.
        """
        rows = [self._row[_key(prompt)] for prompt in prompts]
        columns: dict[str, list[Any]] = {}
        for name, values in self._columns.items():
            columns[name] = [values[row] for row in rows]
        total = [0.0] * len(replies)
        for weight, function in self._functions:
            scores = FunctionJudge(function, columns).score(prompts, replies)
            total = [before + weight * score for before, score in zip(total, scores, strict=True)]
        return total


def _key(prompt: Sequence[Message]) -> str:
    return json.dumps([(turn.role, turn.content) for turn in prompt])

"""Whether one model's replies are better than another's, by a judge that neither was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import (
    RewardFunction,
    checked_tokenizer,
    columns_beside,
    evaluating,
    records_of,
    rows_of,
)
from rlhf_core.api.reward_model import TrainedRewardModel
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.comparisons.comparison import compare, length_differences, tie_margin_of
from rlhf_core.evaluation.judges.model import Judge, ModelJudge
from rlhf_core.evaluation.replies import Reply, evaluation_replies
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.given import require_plain
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.reward_sources.functions import FunctionReward, PythonFunction
from rlhf_core.ppo.reward_sources.source import checked_scores

TIE_SHARE = 0.05  # of the spread of the baseline's scores: a smaller difference of a model's scores is a tie
BATCH = 64


@dataclass(frozen=True)
class PolicyComparison:
    """How the candidate's replies fare against the baseline's.

    Attributes:
        metrics: ``win_rate`` of the candidate (ties count half) with ``win_rate_low95`` and
            ``win_rate_high95``, its value at equal lengths as ``lc_win_rate``, ``win``, ``tie`` and
            ``lose`` as shares of ``prompts``, ``mean_difference`` in the judge's unit with bounds,
            the mean score of each side, and ``unscored``, prompts that the judge could not score.
        rows: Each prompt with both replies and their scores.
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def compare_policies(
    candidate: PreTrainedModel | Path,
    baseline: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt | Mapping[str, Any] | str],
    judge: RewardFunction | ScalarModel | TrainedRewardModel | Path,
    *,
    sampling: SamplingConfig | None = None,
    seed: int = 1,
    batch_size: int = BATCH,
) -> PolicyComparison:
    """Let a judge compare the replies of two models to the same prompts.

    Both sample with the same random numbers. Prompts that neither model was trained on, and a judge
    that nothing was trained or selected by, make the win rate mean something. Bounds resample
    prompts.

    Args:
        candidate: The model in question, or its folder.
        baseline: What it is compared with, such as the model that training began with, or its
            folder.
        tokenizer: The tokenizer of both.
        prompts: Held-out prompts: strings, or records such as ``{"prompt": ...}``.
        judge: A reward model of the same tokenizer, its folder, or a reward function as
            ``train_ppo`` takes it.
        sampling: How replies are sampled.
        seed: Seed of replies and of the bounds.
        batch_size: Replies sampled or scored at once.

    Raises:
        ConfigError: The judge is not a judge.
        DataError: A prompt leaves no room for a reply, or the judge could score too little.
    """
    require_plain(candidate, "candidate")
    require_plain(baseline, "baseline")
    tokenizer = checked_tokenizer(tokenizer, candidate)
    records = records_of(prompts, "prompts")
    turns = [row.prompt for row in rows_of(Prompt, records, "prompts")]
    score = judge.model if isinstance(judge, TrainedRewardModel) else judge
    with evaluating(candidate, baseline, score):
        replies = []
        settings = sampling or SamplingConfig()
        for given in (candidate, baseline):
            model = load_policy(given)[0] if isinstance(given, Path) else given
            answers = evaluation_replies(
                model, tokenizer, turns, settings, seed, batch_size=batch_size
            )
            replies.append(answers)
        asked = _judge_of(score, tokenizer, columns_beside(records), batch_size)
        scores = np.array([asked.score(turns, of_model) for of_model in replies])
    return _compared(turns, replies, scores, asked, seed)


def _compared(
    turns: Sequence[Sequence[Message]],
    replies: Sequence[Sequence[Reply]],
    scores: np.ndarray,
    judge: Judge,
    seed: int,
) -> PolicyComparison:
    known: list[int] = np.flatnonzero(~np.isnan(scores).any(axis=0)).tolist()
    if len(known) < 2:
        raise DataError(
            f"the judge could score {len(known)} of {len(turns)} prompts, and at least 2 are needed"
        )
    first, second = scores[0, known], scores[1, known]
    candidate, baseline = replies
    of_candidate = [candidate[row] for row in known]
    of_baseline = [baseline[row] for row in known]
    longer_by = length_differences(of_candidate, of_baseline)
    numbers: dict[str, int] = {}  # equal prompts are one question
    asked = []
    for row in known:
        prompt = repr([(turn.role, turn.content) for turn in turns[row]])
        asked.append(numbers.setdefault(prompt, len(numbers)))
    margin = tie_margin_of(judge, TIE_SHARE, second.tolist())
    metrics = compare(first, second, margin, seed=seed, length_difference=longer_by, clusters=asked)
    metrics |= {
        "score_candidate": float(first.mean()),
        "score_baseline": float(second.mean()),
        "unscored": float(len(turns) - len(known)),
    }
    rows: list[dict[str, Any]] = []
    for row, dialogue in enumerate(turns):
        of_row: dict[str, Any] = {
            "prompt": dialogue[-1].content,
            "candidate": candidate[row].text,
            "baseline": baseline[row].text,
        }
        for name, score in zip(("candidate", "baseline"), scores[:, row], strict=True):
            of_row[f"score_{name}"] = None if math.isnan(score) else float(score)
        rows.append(of_row)
    return PolicyComparison(metrics, rows)


class FunctionJudge:
    """Scores replies by a function of the user's; NaN for a reply that it cannot score."""

    name = "judge"
    absolute_tie: float | None = 0.0  # what a program counts differs or does not

    def __init__(self, function: PythonFunction, columns: Mapping[str, list[Any]]) -> None:
        self.function, self.columns = function, {name: columns[name] for name in function.read}

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Return one score per reply, in order."""
        turns = []
        for prompt in prompts:
            turns.append([{"role": turn.role, "content": turn.content} for turn in prompt])
        scores, _ = self.function.scores(turns, [reply.text for reply in replies], self.columns)
        return checked_scores(scores, len(replies), self.function.who, none_is_unscored=True)


def _judge_of(
    judge: Any,
    tokenizer: PreTrainedTokenizerBase,
    columns: Mapping[str, list[Any]],
    batch_size: int,
) -> Judge:
    if isinstance(judge, Path):
        return ModelJudge.load(judge, "judge", batch_size)
    if isinstance(judge, ScalarModel):
        positions = positions_of(judge.model.config)
        return ModelJudge(judge.eval(), tokenizer, "judge", batch_size, positions)
    called = judge.function if isinstance(judge, FunctionReward) else judge
    if not callable(called):
        raise ConfigError(
            f"judge is a {type(judge).__name__}; give a function f(prompts, replies) or a reward model"
        )
    who = f"the judge {getattr(called, '__name__', '')}".rstrip()
    return FunctionJudge(PythonFunction(judge, who, list(columns)), columns)

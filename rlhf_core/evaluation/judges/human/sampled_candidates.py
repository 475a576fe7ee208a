"""Pairs for annotation on training prompts: only those can train the next round's models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.schema import Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import tie_margin_of
from rlhf_core.evaluation.judges.disagreement import worst_disagreements
from rlhf_core.evaluation.judges.final import JUDGE, MODELS, TRAINED_ON
from rlhf_core.evaluation.judges.human.pairs import Candidate
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.evaluation.replies.generation import evaluation_replies
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime.progress import progress

TRAINING_PROMPTS = Path("data") / "clean" / "prompts" / "train.parquet"


def sampled_candidates(workspace: Path, count: int, replies_per_prompt: int = 1) -> tuple[list[Candidate], list[int]]:
    """Let SFT and policy reply to ``count`` training prompts; return the pairs, and the positions of the bad cases.

    Replies have the evaluation's sampling, bad cases are those of the reward model and the judge. With several replies
    per prompt, the first of SFT is paired with the first of the policy, and so on; a pair that repeats counts once.

    Raises:
        DataError: There are no training prompts.
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    rows = fixed_subset(read_rows(workspace / TRAINING_PROMPTS, Prompt), count, "annotation")
    if not rows:
        raise DataError(f"{workspace / TRAINING_PROMPTS} has no rows")
    prompts = [row.prompt for row in rows]
    replies: dict[str, list[Reply]] = {}
    with progress(2 * len(rows) * replies_per_prompt, "replies to training prompts") as bar:
        for name in ("sft", "policy"):
            model, tokenizer = load_policy(workspace / MODELS / name)
            replies[name] = evaluation_replies(
                model,
                tokenizer,
                prompts,
                config.sampling,
                config.seed,
                bar.advance,
                config.batch_size,
                replies_per_prompt,
            )
            del model
    rows = [row for row in rows for _ in range(replies_per_prompt)]
    prompts = [row.prompt for row in rows]
    gains, margin = {}, 0.0
    for name in (TRAINED_ON, JUDGE):
        judge = ModelJudge.load(workspace / MODELS / name, name, config.batch_size)
        baseline = judge.score(prompts, replies["sft"])
        gains[name] = np.subtract(judge.score(prompts, replies["policy"]), baseline)
        margin = tie_margin_of(judge, config.tie_margin, baseline)
    reward_gain, judge_gain = gains.values()
    candidates = [
        Candidate([dict(vars(turn)) for turn in row.prompt], row.category, sft.text, policy.text)
        for row, sft, policy in zip(rows, replies["sft"], replies["policy"], strict=True)
    ]
    return _without_repeats(
        candidates, [position for position, _ in worst_disagreements(reward_gain, judge_gain, margin)]
    )


def _without_repeats(candidates: Sequence[Candidate], bad_cases: Sequence[int]) -> tuple[list[Candidate], list[int]]:
    """Keep the first of equal pairs, whoever wrote which reply, and the bad cases among those that are kept."""
    first: dict[str, int] = {}
    for position, candidate in enumerate(candidates):
        first.setdefault(candidate.key, position)
    kept = {position: new for new, position in enumerate(first.values())}
    return [candidates[position] for position in kept], [kept[case] for case in bad_cases if case in kept]

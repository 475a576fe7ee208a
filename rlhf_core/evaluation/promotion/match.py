"""Two policies on the same held-out prompts, by judges that neither was trained on or selected by, for promotions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.loading.load import load_section
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations.operations import RegistryConfig
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.data.schema import Message, Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare, compare_outcomes, outcomes, tie_margin_of
from rlhf_core.evaluation.comparisons.length_control import length_differences
from rlhf_core.evaluation.judges.final import MODELS, judging_model
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.judges.llm.judge import ANSWERS, LlmJudge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.promotion.measure import MatchPrompts, MatchReplies, paired_losses
from rlhf_core.evaluation.promotion.non_inferiority import as_measurements
from rlhf_core.evaluation.promotion.prompt_sets import prompts_of_set
from rlhf_core.evaluation.regression import regression_set
from rlhf_core.evaluation.replies.generation import evaluation_replies
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.evaluation.safety.refusals import safety_prompts
from rlhf_core.evaluation.verifiable.prompts import VerifiablePrompts
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.storage.files import sha256_tree
from rlhf_core.world.grammar import is_world

PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"


def run_match(workspace: Path, champion: Path, challenger: Path, prompt_set: int = 0) -> dict[str, Any]:
    """Compare the model folders ``challenger`` and ``champion`` on the workspace's fixed test prompts.

    The judges are the workspace's judge; when every prompt is of the synthetic world, the gold judge; and where
    ``evaluate.llm_judge`` is set, the LLM judge. Never the reward model, which the policy was optimised against, nor
    the referee, which selected its checkpoint, unless the workspace has no judge. Both models get the evaluation's
    sampling and the same random numbers.

    Args:
        prompt_set: Which of the sets of ``evaluate.prompts`` test prompts is judged, from 0, which is the evaluation's.

    Returns:
        ``comparison`` (of the challenger, by judge: win, tie, lose, win_rate, …), ``losses`` (by how much the
        challenger may be worse, :class:`~rlhf_core.evaluation.promotion.non_inferiority.PairedLoss`), ``champion`` and
        ``challenger`` (text metrics of each), ``prompts`` (how many) and ``content`` (sha256 of the folders).
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    held_out = _test_prompts(workspace)
    sets = load_section(workspace, "registry", RegistryConfig).prompt_sets
    rows = prompts_of_set(held_out, config.prompts, prompt_set, sets)
    prompts = [row.prompt for row in rows]
    world = all(is_world(prompt[-1].content) for prompt in prompts)
    safety = safety_prompts(0 if world else config.safety.prompts)
    verifiable = VerifiablePrompts.load(config.verifiable, workspace)
    data = MatchPrompts(rows, regression_set(held_out), safety, verifiable)
    llm_judge = LlmJudge(config.llm_judge, workspace / ANSWERS) if config.llm_judge else None
    name = judging_model(workspace)
    judges: list[Judge] = [ModelJudge.load(workspace / MODELS / name, name, config.batch_size)]
    if world:
        judges.append(GoldJudge())
    further = (config.replies_per_prompt - 1) * len(prompts)
    with progress(2 * (data.count + further), "match") as bar:
        champion_replies, old = _sample(champion, data, config, bar)
        challenger_replies, new = _sample(challenger, data, config, bar)
    by_prompt = (len(prompts), config.replies_per_prompt)
    longer_by = length_differences(challenger_replies, champion_replies).reshape(by_prompt)
    asked = [prompt for prompt in prompts for _ in range(config.replies_per_prompt)]
    comparison, outcome = {}, {}
    for judge in judges:
        scores, baseline = (
            np.reshape(judge.score(asked, replies), by_prompt) for replies in (challenger_replies, champion_replies)
        )
        margin = tie_margin_of(judge, config.tie_margin, baseline.ravel().tolist())
        outcome[judge.name] = outcomes(scores - baseline, margin)[:, 0]
        comparison[judge.name] = compare(scores, baseline, margin, config.bootstrap, config.seed, longer_by).as_dict()
    if llm_judge is not None:
        judgements = llm_judge.judge(prompts, new.judged, old.judged)
        comparison[llm_judge.name] = compare_outcomes(
            judgements.outcomes(), config.bootstrap, config.seed, longer_by[judgements.judged, 0]
        ).as_dict()
    folders = {"champion": champion, "challenger": challenger, name: workspace / MODELS / name}
    return {
        "comparison": comparison,
        "losses": as_measurements(paired_losses(data, old, new, outcome[name], world, config)),
        "champion": measure_text(old.judged).as_dict(),
        "challenger": measure_text(new.judged).as_dict(),
        "prompts": len(prompts),
        "content": {role: sha256_tree(folder) for role, folder in folders.items()},
    }


def _test_prompts(workspace: Path) -> list[Prompt]:
    rows = read_rows(workspace / PROMPTS, Prompt)
    if not rows:
        raise DataError(f"{workspace / PROMPTS} has no rows; raise validate.split.test")
    return rows


def _sample(
    folder: Path, data: MatchPrompts, config: EvaluateConfig, bar: Progress
) -> tuple[list[Reply], MatchReplies]:
    """Sample from the model in ``folder``, which is in memory only meanwhile: all replies to be judged, and those that
    paired losses are measured on, the first to each prompt.
    """
    model, tokenizer = load_policy(folder)
    tokens = min(config.safety.max_new_tokens, config.sampling.max_new_tokens)
    shorter = config.sampling.model_copy(update={"max_new_tokens": tokens})

    def sampled(
        asked: Sequence[Sequence[Message]], sampling: SamplingConfig = config.sampling, replies_per_prompt: int = 1
    ) -> list[Reply]:
        return evaluation_replies(
            model, tokenizer, asked, sampling, config.seed, bar.advance, config.batch_size, replies_per_prompt
        )

    judged, regression, safety = ([row.prompt for row in rows] for rows in (data.judged, data.regression, data.safety))
    replies = sampled(judged, replies_per_prompt=config.replies_per_prompt)
    first = replies[:: config.replies_per_prompt]
    return replies, MatchReplies(first, sampled(regression), sampled(safety, shorter), sampled(data.verifiable.prompts))

"""The match of a challenger against the champion on the fixed sets, by every judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.evaluation.comparisons.comparison import (
    compare,
    compare_outcomes,
    length_differences,
    outcomes,
    tie_margin_of,
)
from rlhf_core.evaluation.fixed_sets import FixedSets, SetReplies, sample_sets
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.llm.judge import ANSWERS, LlmJudge
from rlhf_core.evaluation.judges.model import JUDGE, MODELS, ModelJudge
from rlhf_core.evaluation.judges.pairwise import Judge
from rlhf_core.evaluation.losses import as_measurements, paired_losses
from rlhf_core.evaluation.metrics.text_metrics import measure_text
from rlhf_core.evaluation.statistics import clusters_of
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.storage.files import sha256_tree

CLEAN = Path("data") / "clean"


def run_match(workspace: Path, champion: Path, challenger: Path, prompt_set: int = 0) -> dict[str, Any]:
    """Compare the model folders ``challenger`` and ``champion`` on the workspace's fixed test prompts.

    The judges are the workspace's judge; when every prompt is of the synthetic world, the gold judge; and where
    ``evaluate.llm_judge`` is set, the LLM judge. Never the reward model, which the policy was optimised against, nor
    the referee, which selected its checkpoint. Both models get the evaluation's sampling, with as many replies to each
    prompt, and the same random numbers.

    Args:
        prompt_set: Which of the sets of ``evaluate.prompts`` test prompts is judged, from 0, which is the evaluation's.

    Returns:
        ``comparison`` (of the challenger, by judge: win, tie, lose, win_rate, …), ``losses`` (by how much the
        challenger may be worse, :class:`~rlhf_core.evaluation.losses.PairedLoss`), ``champion`` and
        ``challenger`` (text metrics of each), ``prompts`` (how many) and ``content`` (sha256 of the folders).
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    in_turn = load_section(workspace, "registry", RegistryConfig).prompt_sets
    sets = FixedSets.read(config, workspace / CLEAN, workspace, prompt_set, in_turn)
    llm_judge = LlmJudge(config.llm_judge, workspace / ANSWERS) if config.llm_judge else None
    judges: list[Judge] = [ModelJudge.load(workspace / MODELS / JUDGE, JUDGE, config.batch_size)]
    if sets.world:
        judges.append(GoldJudge())
    for folder in (champion, challenger):  # either may be of somebody else's
        require_openable(folder)
    with progress(2 * sets.replies(config), "match") as bar:
        old, new = (_sample(folder, sets, config, bar) for folder in (champion, challenger))
    prompts, replies = [row.prompt for row in sets.judged], config.replies_per_prompt
    by_prompt, clusters = (len(prompts), replies), clusters_of(sets.judged)
    longer_by = length_differences(new.judged, old.judged).reshape(by_prompt)
    asked = [prompt for prompt in prompts for _ in range(replies)]
    comparison, outcome = {}, {}
    for judge in judges:
        scores, baseline = (np.reshape(judge.score(asked, side.judged), by_prompt) for side in (new, old))
        margin = tie_margin_of(judge, config.tie_margin, baseline.ravel().tolist())
        outcome[judge.name] = outcomes(scores - baseline, margin)
        compared = compare(scores, baseline, margin, config.bootstrap, config.seed, longer_by, clusters)
        comparison[judge.name] = compared.as_dict()
    if llm_judge is not None:
        judgements = llm_judge.judge(prompts, new.judged[::replies], old.judged[::replies])
        rows = judgements.judged
        comparison[llm_judge.name] = compare_outcomes(
            judgements.outcomes(), config.bootstrap, config.seed, longer_by[rows, 0], clusters[rows]
        ).as_dict()
    folders = {"champion": champion, "challenger": challenger, JUDGE: workspace / MODELS / JUDGE}
    return {
        "comparison": comparison,
        "losses": as_measurements(paired_losses(sets, old, new, outcome[JUDGE])),
        "champion": measure_text(old.judged).as_dict(),
        "challenger": measure_text(new.judged).as_dict(),
        "prompts": len(prompts),
        "content": {role: sha256_tree(folder) for role, folder in folders.items()},
    }


def _sample(folder: Path, sets: FixedSets, config: EvaluateConfig, bar: Progress) -> SetReplies:
    """Sample from the model in ``folder``, which is in memory only meanwhile."""
    model, tokenizer = load_policy(folder)
    return sample_sets(model, tokenizer, sets, config, bar.advance)

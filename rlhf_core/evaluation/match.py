"""Two policies on the same held-out prompts, by judges that neither was trained on or selected by, for promotions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluate import EvaluateConfig
from rlhf_core.config.loading.load import load_section
from rlhf_core.data.schema import Message, Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparison import compare, tie_margin_of
from rlhf_core.evaluation.generation import evaluation_replies
from rlhf_core.evaluation.judges.final import MODELS, judging_model
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.judge import Judge
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.length_control import length_differences
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.evaluation.reply import Reply
from rlhf_core.evaluation.text_metrics import measure_text
from rlhf_core.files import sha256_tree
from rlhf_core.models.base import load_policy
from rlhf_core.progress import Progress, progress
from rlhf_core.world.grammar import is_world

PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"


def run_match(workspace: Path, champion: Path, challenger: Path) -> dict[str, Any]:
    """Compare the model folders ``challenger`` and ``champion`` on the workspace's fixed test prompts.

    The judges are the workspace's judge and, when every prompt is of the synthetic world, the gold judge; never the
    reward model, which the policy was optimised against, nor the referee, which selected its checkpoint, unless the
    workspace has no judge. Both models get the evaluation's sampling and the same random numbers.

    Returns:
        ``comparison`` (of the challenger, by judge: win, tie, lose, win_rate, …), ``champion`` and ``challenger`` (text
        metrics of each), ``prompts`` (how many) and ``content`` (sha256 of the folders).
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    rows = fixed_subset(read_rows(workspace / PROMPTS, Prompt), config.prompts, "evaluation")
    if not rows:
        raise DataError(f"{workspace / PROMPTS} has no rows; raise validate.split.test")
    prompts = [row.prompt for row in rows]
    name = judging_model(workspace)
    judges: list[Judge] = [ModelJudge.load(workspace / MODELS / name, name, config.batch_size)]
    if all(is_world(prompt[-1].content) for prompt in prompts):
        judges.append(GoldJudge())
    with progress(2 * len(prompts), "match") as bar:
        champion_replies = _sample(champion, prompts, config, bar)
        challenger_replies = _sample(challenger, prompts, config, bar)
    longer_by = length_differences(challenger_replies, champion_replies)
    comparison = {}
    for judge in judges:
        scores, baseline = judge.score(prompts, challenger_replies), judge.score(prompts, champion_replies)
        margin = tie_margin_of(judge, config.tie_margin, baseline)
        comparison[judge.name] = compare(scores, baseline, margin, config.bootstrap, config.seed, longer_by).as_dict()
    folders = {"champion": champion, "challenger": challenger, name: workspace / MODELS / name}
    return {
        "comparison": comparison,
        "champion": measure_text(champion_replies).as_dict(),
        "challenger": measure_text(challenger_replies).as_dict(),
        "prompts": len(prompts),
        "content": {role: sha256_tree(folder) for role, folder in folders.items()},
    }


def _sample(folder: Path, prompts: Sequence[Sequence[Message]], config: EvaluateConfig, bar: Progress) -> list[Reply]:
    """Sample the replies of the model in ``folder``, which is in memory only meanwhile."""
    model, tokenizer = load_policy(folder)
    return evaluation_replies(model, tokenizer, prompts, config.sampling, config.seed, bar.advance, config.batch_size)

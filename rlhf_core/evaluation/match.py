"""Two policies on the same held-out prompts, by every judge there is: what a promotion is decided on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluate import EvaluateConfig
from rlhf_core.config.loading.load import load_section
from rlhf_core.data.schema import Message, Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparison import compare
from rlhf_core.evaluation.judges import GoldJudge
from rlhf_core.evaluation.model_judge import Judge, ModelJudge
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.evaluation.replies import judged_replies
from rlhf_core.evaluation.text_metrics import Reply, describe
from rlhf_core.files import sha256_tree
from rlhf_core.models.base import load_policy
from rlhf_core.progress import Progress, progress
from rlhf_core.world.grammar import is_world

PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
REFEREE = Path("models") / "referee"


def run_match(workspace: Path, champion: Path, challenger: Path) -> dict[str, Any]:
    """Compare the model folders ``challenger`` and ``champion`` on the workspace's fixed test prompts.

    The judges are the workspace's referee and, when every prompt is of the embedded world, the gold judge; never the
    reward model, which the policy was trained to please. Both models get the evaluation's sampling and the same random
    numbers. Returns ``{"comparison": {judge: win, tie, lose, win_rate, …, of the challenger}, "champion": text figures,
    "challenger": text figures, "prompts", "content": sha256 of the folders}``.
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    rows = fixed_subset(read_rows(workspace / PROMPTS, Prompt), config.prompts, "evaluation")
    if not rows:
        raise DataError(f"{workspace / PROMPTS} has no rows; raise validate.split.test")
    prompts = [row.prompt for row in rows]
    judges: list[Judge] = [ModelJudge(workspace / REFEREE, "referee", config.batch_size)]
    if all(is_world(prompt[-1].content) for prompt in prompts):
        judges.append(GoldJudge())
    with progress(2 * len(prompts), "match") as shown:
        old = _replies(champion, prompts, config, shown)
        new = _replies(challenger, prompts, config, shown)
    folders = {"champion": champion, "challenger": challenger, "referee": workspace / REFEREE}
    return {
        "comparison": {judge.name: _judged(judge, prompts, new, old, config) for judge in judges},
        "champion": describe(old),
        "challenger": describe(new),
        "prompts": len(prompts),
        "content": {name: sha256_tree(folder) for name, folder in folders.items()},
    }


def _replies(
    folder: Path, prompts: Sequence[Sequence[Message]], config: EvaluateConfig, shown: Progress
) -> list[Reply]:
    model, tokenizer = load_policy(folder)
    return judged_replies(model, tokenizer, prompts, config.sampling, config.seed, shown.advance, config.batch_size)


def _judged(
    judge: Judge,
    prompts: Sequence[Sequence[Message]],
    challenger: Sequence[Reply],
    champion: Sequence[Reply],
    config: EvaluateConfig,
) -> dict[str, float]:
    """A judge with a unit of its own brings its own tie margin."""
    own = judge.absolute_tie
    margin = config.tie_margin if own is None else own
    scores = judge.score(prompts, challenger), judge.score(prompts, champion)
    return compare(*scores, margin, config.bootstrap, config.seed, absolute=own is not None).as_dict()

"""The match of a challenger against the champion on the fixed sets, by every judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import LLM, EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import FixedSets, sampled_model
from rlhf_core.evaluation.judges.gold import GoldJudge
from rlhf_core.evaluation.judges.model import Judge, ModelJudge, PairwiseJudge
from rlhf_core.evaluation.judges.names import JUDGE, MODELS
from rlhf_core.evaluation.plugged import plugged_judges
from rlhf_core.evaluation.replies import measure_text
from rlhf_core.models.causal_lm import tokenizer_of_policy
from rlhf_core.models.foreign import require_openable
from rlhf_core.runtime.progress import progress
from rlhf_core.sampling.sampler import opened_sampler
from rlhf_core.storage.files import sha256_tree
from rlhf_core.training.history import nonfinite_as_none

CLEAN = Path("data") / "clean"
WORK = Path("work") / "match"


def run_match(
    workspace: Path,
    champion: Path,
    challenger: Path,
    prompt_set: int = 0,
    checker: Judge | None = None,
) -> dict[str, Any]:
    """Compare two model folders on the workspace's fixed test prompts.

    The judges are the workspace's judge, or the ``checker`` where reward functions stand for it;
    when every prompt is of the synthetic world, the gold judge; and where ``evaluate.llm_judge`` is
    set, the LLM judge. Never the reward model, which the policy was optimised against, nor the
    referee, which selected its checkpoint. Both models get the evaluation's sampling, with as many
    replies to each prompt, and the same random numbers.

    Args:
        prompt_set: Which of the sets of ``evaluate.prompts`` test prompts is judged, from 0, which
            is the evaluation's.
        checker: The reward functions as a judge, in a workspace without pairs.

    Returns:
        ``comparison`` (of the challenger, by judge: win, tie, lose, win_rate, …), ``losses`` (by
            how much the
        challenger may be worse, :class:`~rlhf_core.evaluation.losses.PairedLoss`), ``champion`` and
        ``challenger`` (text metrics of each), ``prompts`` (how many) and ``content`` (sha256 of the
        folders).
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    in_turn = load_section(workspace, "registry", RegistryConfig).prompt_sets
    sets = FixedSets.read(config, workspace / CLEAN, workspace, prompt_set, in_turn)
    named = {}
    if config.llm_judge is not None:
        named = {LLM: config.llm_judge}
    further = plugged_judges(named, workspace)
    folders = {"champion": champion, "challenger": challenger}
    if checker is not None:
        judges: list[Judge] = [checker]
    else:
        folders[JUDGE] = workspace / MODELS / JUDGE
        judges = [ModelJudge.load(folders[JUDGE], JUDGE, config.batch_size)]
    if sets.world:
        judges.append(GoldJudge())
    for folder in (champion, challenger):  # either may come from a third party
        require_openable(folder)
        tokenizer_of_policy(folder)
    with (
        opened_sampler(config.sampler, workspace / WORK, workspace) as sampler,
        progress(2 * sets.replies(config), "match") as bar,
    ):
        old, new = (
            sampled_model(folder, sets, config, bar, sampler) for folder in (champion, challenger)
        )
    evaluation = Evaluation(sets, old, new, config)
    for judge in judges:
        evaluation.score(judge)
    for one in further:
        assert isinstance(one, PairwiseJudge)
        evaluation.judge(one)
    return nonfinite_as_none(
        {
            "comparison": evaluation.comparison,
            "losses": evaluation.losses(),
            "champion": measure_text(old.judged),
            "challenger": measure_text(new.judged),
            "prompts": len(sets.judged),
            "content": {role: sha256_tree(folder) for role, folder in folders.items()},
        }
    )

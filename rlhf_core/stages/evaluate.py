"""The policy against SFT on held-out prompts, by every judge there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedModel

from rlhf_core.config.evaluate import EvaluateConfig
from rlhf_core.data.schema import Prompt, read_rows, write_table
from rlhf_core.errors import DataError
from rlhf_core.evaluation.evaluator import Evaluation, Side, compare_sides
from rlhf_core.evaluation.judges import GoldJudge
from rlhf_core.evaluation.model_judge import ModelJudge, Scale, ScaleOf
from rlhf_core.evaluation.regression import fixed_subset, regression_set
from rlhf_core.evaluation.replies import Sampled, judged_replies, measure_drift, unfiltered_replies
from rlhf_core.evaluation.text_metrics import Reply
from rlhf_core.files import atomic_write_json, atomic_write_text
from rlhf_core.models.base import load_policy
from rlhf_core.progress import Progress, progress
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.tracking import Tracker
from rlhf_core.world.grammar import is_world

WORLD_SOURCE = "world"

STAGE = Stage(
    name="evaluate",
    section="evaluate",
    config=EvaluateConfig,
    inputs={
        "clean": "data/clean",
        "sft": "models/sft",
        "policy": "models/policy",
        "reward": "models/reward",
        "referee": "models/referee",
    },
    outputs={
        "metrics": "metrics/evaluation.json",
        "comparisons": "samples/comparisons.parquet",
        "bad_cases": "samples/bad_cases.jsonl",
    },
)


def run(config: EvaluateConfig, inputs: Paths, outputs: Paths, tracker: Tracker) -> dict[str, Any]:
    """Generate, judge, compare; write metrics, all rows, and the cases where reward and judge disagree.

    Gold judges only prompts of the embedded world. Evaluation sampling is used for what is judged,
    unfiltered sampling at temperature 1 for KL and perplexity.
    """
    held_out = read_rows(inputs.clean / "prompts" / "test.parquet", Prompt)
    if not held_out:
        raise DataError(f"{inputs.clean / 'prompts' / 'test.parquet'} has no rows; raise validate.split.test")
    prompts = fixed_subset(held_out, config.prompts, "evaluation")
    fixed = regression_set(held_out)
    world = of_the_world(prompts)
    sft, policy = _sides(config, inputs, prompts, fixed)
    judges: list[Scale] = []
    for name in ("reward", "referee", *(["gold"] if world else [])):
        # One after the other: large ones need the room of the one before.
        judge = GoldJudge() if name == "gold" else ModelJudge(inputs[name], name, config.batch_size)
        sft, policy = sft.judged([judge], prompts), policy.judged([judge], prompts)
        judges.append(ScaleOf(judge.name, judge.absolute_tie))
        del judge
    comparisons = compare_sides(policy, sft, judges, config.tie_margin, config.bootstrap, config.seed)
    evaluation = Evaluation(prompts, fixed, sft, policy, comparisons)
    metrics = evaluation.metrics(world)
    _write(evaluation, metrics, judges[-1].name, config.bad_cases, outputs)
    tracker.log_artifact(outputs.comparisons, "samples")
    tracker.log_artifact(outputs.bad_cases, "samples")
    return metrics


def of_the_world(prompts: Sequence[Prompt]) -> bool:
    """Whether all prompts say they come from the embedded world. ``DataError`` when one of them is unknown to it:
    a gold judge that is silently missing would be worse than a stop."""
    if any(row.source != WORLD_SOURCE for row in prompts):
        return False
    unknown = [row.prompt[-1].content for row in prompts if not is_world(row.prompt[-1].content)]
    if unknown:
        raise DataError(
            f"{len(unknown)} test prompts are of another version of the embedded world, such as {unknown[0][:60]!r}; "
            "run the collect stage again"
        )
    return True


@dataclass(frozen=True)
class _Spoken:
    """What one model said: to be judged, to the regression set, and without filters."""

    replies: list[Reply]
    regression: list[Reply]
    free: Sampled


def _sides(
    config: EvaluateConfig, inputs: Paths, prompts: Sequence[Prompt], fixed: Sequence[Prompt]
) -> tuple[Side, Side]:
    """Both models in turn, then SFT's view of what they said without filters: one model is in memory at a time."""
    with progress(2 * (len(prompts) + len(fixed)), "evaluate") as shown:
        sft, policy = (_spoken(config, inputs[name], prompts, fixed, shown) for name in ("sft", "policy"))
    reference, _ = load_policy(inputs.sft)
    return _side(sft, reference), _side(policy, reference)


def _spoken(
    config: EvaluateConfig, folder: Path, prompts: Sequence[Prompt], fixed: Sequence[Prompt], shown: Progress
) -> _Spoken:
    """Replies of the model in ``folder``; all models get the same random numbers."""
    model, tokenizer = load_policy(folder)
    messages, again, rows = [row.prompt for row in prompts], [row.prompt for row in fixed], config.batch_size
    replies = judged_replies(model, tokenizer, messages, config.sampling, config.seed, shown.advance, rows)
    regression = judged_replies(model, tokenizer, again, config.sampling, config.seed, shown.advance, rows)
    few, length = messages[: config.kl_samples], config.max_new_tokens
    return _Spoken(replies, regression, unfiltered_replies(model, tokenizer, few, length, config.seed + 1, rows))


def _side(spoken: _Spoken, reference: PreTrainedModel) -> Side:
    return Side(spoken.replies, spoken.regression, measure_drift(spoken.free, reference))


def _write(evaluation: Evaluation, metrics: dict[str, Any], judge: str, limit: int, outputs: Paths) -> None:
    """``judge`` is the best one there is: gold in the embedded world, else the referee."""
    write_table(outputs.comparisons, pa.Table.from_pylist(evaluation.rows()))
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.bad_cases(judge, limit)]
    atomic_write_text(outputs.bad_cases, "".join(lines))
    atomic_write_json(outputs.metrics, metrics)

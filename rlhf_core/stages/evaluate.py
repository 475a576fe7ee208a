"""Stage evaluate: the policy against SFT on held-out prompts, by every judge there is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedModel

from rlhf_core.config.evaluation import EvaluateStageConfig
from rlhf_core.data.schema import Prompt, write_table
from rlhf_core.evaluation.benchmarks.multiple_choice import AnsweredQuestions, MultipleChoiceSet, answer_questions
from rlhf_core.evaluation.comparisons.comparison import compare_groups
from rlhf_core.evaluation.comparisons.opponents import Rival, best_of_n, group_of, read_opponent
from rlhf_core.evaluation.comparisons.policy_vs_sft import EvaluatedModel, side_by_side
from rlhf_core.evaluation.fixed_sets import FixedSets, SetReplies, sample_sets
from rlhf_core.evaluation.judges.gold import load_judge
from rlhf_core.evaluation.judges.llm.judge import ANSWERS, LlmJudge
from rlhf_core.evaluation.losses import as_measurements, paired_losses
from rlhf_core.evaluation.perplexity import HeldOutText, held_out_perplexities, measure_drift
from rlhf_core.evaluation.replies import OnPolicyReplies, evaluation_replies, on_policy_replies
from rlhf_core.evaluation.reply import Reply
from rlhf_core.evaluation.safety.prompts import refusal_rates
from rlhf_core.evaluation.statistics import clusters_of
from rlhf_core.evaluation.verifiable import VerifiablePrompts
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime import distributed
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines, atomic_write_text
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

DECIDING = "judge"  # whose outcomes by category are bounded
VERIFIABLE_REPLIES = Path(".rlhf") / "verifiable.jsonl"
MULTIPLE_CHOICE_ANSWERS = Path(".rlhf") / "multiple_choice.jsonl"


def run(config: EvaluateStageConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Generate, judge, compare; write metrics, all rows, and the cases where reward and judge disagree.

    The gold judge scores only prompts of the synthetic world. Evaluation sampling makes the replies that are judged,
    the training distribution those that KL and perplexity are measured on. Ranks share all passes of models.
    """
    llm_judge = LlmJudge(config.llm_judge, context.folder / ANSWERS) if config.llm_judge else None
    data = EvaluationData.read(config, inputs.clean, context.folder)
    world = data.sets.world
    with progress(data.replies(config), "evaluate") as bar:
        sft_samples = samples_of(config, inputs.sft, data, bar, best_of=config.best_of_n)
        policy_samples = samples_of(config, inputs.policy, data, bar)
    reference, _ = load_policy(inputs.sft)
    sft, policy = (evaluated_model(samples, data, reference) for samples in (sft_samples, policy_samples))
    del reference
    names = ("reward", "referee", "judge", "gold") if world else ("reward", "referee", "judge")
    evaluation = side_by_side(data.sets, sft, policy)
    for name in names:
        # One judge at a time: a large one needs the memory of the one before.
        evaluation = evaluation.scored_by(load_judge(name, inputs, config.batch_size), config)
    opponents, candidates, best = data.opponents, sft_samples.candidates, []
    if candidates:
        reward = load_judge("reward", inputs, config.batch_size)
        best = [best_of_n(reward, [row.prompt for row in data.prompts], candidates)]
        del reward
    for name in names if opponents or best else ():
        judge = load_judge(name, inputs, config.batch_size)
        opponents, best = ([rival.scored_by(judge, evaluation) for rival in rivals] for rivals in (opponents, best))
        del judge
    distributed.release_nonzero_ranks()  # what is left runs none of these models
    if llm_judge is not None:
        evaluation = evaluation.judged_by(llm_judge, config)
        opponents = [opponent.judged_by(llm_judge, evaluation) for opponent in opponents]
    metrics, rows = evaluation.metrics(world, config), evaluation.rows()
    outcome = evaluation.outcomes()
    losses = paired_losses(data.sets, sft_samples.sets, policy_samples.sets, outcome[DECIDING])
    metrics["losses"] = as_measurements(losses)
    first_rows = rows[:: config.replies_per_prompt]
    groups = [group_of(prompt, config.groups) for prompt in data.prompts]
    if any(groups):
        metrics["group"] = compare_groups(groups, outcome, config.bootstrap, config.seed, clusters_of(data.prompts))
    for settings, opponent in zip(config.opponents, opponents, strict=True):
        measured = opponent.opponent_metrics(evaluation, groups, config)
        metrics.setdefault("opponents", {})[settings.name] = measured
    if best:
        metrics["best_of_n"] = best[0].best_of_n_metrics(evaluation, candidates, config)
    for rival in (*opponents, *best):
        add_columns(first_rows, rival.columns())
    if config.verifiable is not None:
        metrics["verifiable"] = verifiable_metrics(config, data.sets.verifiable, sft_samples, policy_samples, context)
    if config.multiple_choice is not None:
        answered = AnsweredQuestions(data.multiple_choice, sft_samples.answers, policy_samples.answers)
        answered.add_to(metrics, config.bootstrap, config.seed)
        atomic_write_lines(context.folder / MULTIPLE_CHOICE_ANSWERS, answered.rows())
        context.tracker.log_artifact(context.folder / MULTIPLE_CHOICE_ANSWERS, "samples")
    write_table(outputs.comparisons, pa.Table.from_pylist(rows))
    # The last judge is the best one there is: gold in the synthetic world, else the one that selected nothing.
    bad_cases = evaluation.bad_cases(names[-1], config.bad_cases)
    atomic_write_text(outputs.bad_cases, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad_cases))
    atomic_write_json(outputs.metrics, metrics)
    context.tracker.log_artifact(outputs.comparisons, "samples")
    context.tracker.log_artifact(outputs.bad_cases, "samples")
    return metrics


STAGE = Stage(
    name="evaluate",
    section="evaluate",
    config=EvaluateStageConfig,
    beside=("ppo",),
    run=run,
    inputs={
        "clean": "data/clean",
        "sft": "models/sft",
        "policy": "models/policy",
        "reward": "models/reward",
        "referee": "models/referee",
        "judge": "models/judge",
    },
    outputs={
        "metrics": "metrics/evaluation.json",
        "comparisons": "samples/comparisons.parquet",
        "bad_cases": "samples/bad_cases.jsonl",
    },
)


@dataclass(frozen=True)
class EvaluationData:
    """What both models are evaluated on: the fixed sets of prompts, and what else is measured."""

    sets: FixedSets
    multiple_choice: MultipleChoiceSet
    held_out: HeldOutText
    opponents: list[Rival]

    @classmethod
    def read(cls, config: EvaluateStageConfig, clean: Path, workspace: Path) -> EvaluationData:
        """Read the clean data and the files that the settings name; a mistake in one stops the stage at once.

        Raises:
            DataError: There are no test prompts, or a file cannot be used.
        """
        sets = FixedSets.read(config, clean, workspace)
        return cls(
            sets,
            MultipleChoiceSet.load(config.multiple_choice, workspace),
            HeldOutText.read(clean, config.perplexity.rows),
            [read_opponent(opponent, sets.judged, workspace) for opponent in config.opponents],
        )

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts whose replies are judged."""
        return list(self.sets.judged)

    def replies(self, config: EvaluateStageConfig) -> int:
        """How many replies of the evaluation's sampling the two models make together."""
        return 2 * self.sets.replies(config) + config.best_of_n * len(self.prompts)


@dataclass(frozen=True)
class EvaluationSamples:
    """What one model generated: replies to the fixed sets, and from the training distribution; its perplexity of
    held-out text by kind and its answers to the multiple-choice questions; and further lists of replies to be judged,
    of which the best may be chosen.
    """

    sets: SetReplies
    on_policy: OnPolicyReplies
    perplexities: dict[str, float]
    answers: list[int | None]
    candidates: list[list[Reply]]


def samples_of(
    config: EvaluateStageConfig, folder: Path, data: EvaluationData, bar: Progress, best_of: int = 0
) -> EvaluationSamples:
    """Sample from the model in ``folder``, which is in memory only meanwhile; every model gets the same random numbers.

    Args:
        config: The stage's settings.
        folder: The model and its tokenizer.
        data: The prompts and texts.
        bar: Advanced by one for each reply of the evaluation's sampling.
        best_of: How many further replies to sample to each prompt to be judged, with random numbers of their own.
    """
    model, tokenizer = load_policy(folder)
    sampling = Sampling.for_tokenizer(
        tokenizer, config.max_new_tokens, config.ppo.temperature, config.ppo.min_new_tokens
    )
    messages = [row.prompt for row in data.prompts]
    return EvaluationSamples(
        sets=sample_sets(model, tokenizer, data.sets, config, bar.advance),
        on_policy=on_policy_replies(
            model, tokenizer, messages[: config.kl_samples], sampling, config.seed + 1, config.batch_size
        ),
        perplexities=held_out_perplexities(model, tokenizer, data.held_out, config.perplexity),
        answers=answer_questions(model, tokenizer, data.multiple_choice, config.batch_size),
        candidates=[
            evaluation_replies(
                model,
                tokenizer,
                messages,
                config.sampling,
                derive_seed(config.seed, "evaluate", "best_of_n", number),
                bar.advance,
                config.batch_size,
            )
            for number in range(best_of)
        ],
    )


def evaluated_model(samples: EvaluationSamples, data: EvaluationData, reference: PreTrainedModel) -> EvaluatedModel:
    """What a model's samples say of it before it is judged; ``reference`` is SFT."""
    return EvaluatedModel(
        samples.sets.judged,
        samples.sets.regression,
        measure_drift(samples.on_policy, reference, clusters_of(data.prompts)),
        perplexities=samples.perplexities,
        refusals=refusal_rates(data.sets.safety, samples.sets.safety),
    )


def add_columns(rows: Sequence[dict[str, Any]], columns: Sequence[Mapping[str, Any]]) -> None:
    """Add further columns to rows, in place."""
    for row, further in zip(rows, columns, strict=True):
        row.update(further)


def verifiable_metrics(
    config: EvaluateStageConfig,
    prompts: VerifiablePrompts,
    sft_samples: EvaluationSamples,
    policy_samples: EvaluationSamples,
    context: RunContext,
) -> dict[str, Any]:
    """Check the replies to the verifiable prompts; all of them go to ``.rlhf/verifiable.jsonl`` and the tracker."""
    sft, policy = (prompts.check(samples.sets.verifiable) for samples in (sft_samples, policy_samples))
    path = context.folder / VERIFIABLE_REPLIES
    atomic_write_lines(path, prompts.rows(sft, policy))
    context.tracker.log_artifact(path, "samples")
    return prompts.metrics(sft, policy, config.bootstrap, config.seed)

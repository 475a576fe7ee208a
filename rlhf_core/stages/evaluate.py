"""Stage evaluate: the policy against SFT on held-out prompts, by every judge there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlhf_core.api.checker import Checker
from rlhf_core.config.evaluation import EvaluateStageConfig
from rlhf_core.data.schema import write_table
from rlhf_core.evaluation.comparisons.comparison import compare_groups
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.comparisons.rivals import Rival, best_of_n, group_of
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets, sample_sets
from rlhf_core.evaluation.judges.gold import borrowed_judge
from rlhf_core.evaluation.judges.model import PairwiseJudge
from rlhf_core.evaluation.perplexity import (
    HeldOutText,
    measure_drift,
    read_held_out,
    score_held_out,
)
from rlhf_core.evaluation.plugged import (
    AddedEvaluation,
    added_evaluations,
    added_into,
    plugged_judges,
)
from rlhf_core.evaluation.replies import evaluation_replies, on_policy_replies
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.runtime import distributed
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import Sampler, opened_sampler
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines, atomic_write_text
from rlhf_core.training.engine.frozen import FrozenModels
from rlhf_core.training.history import nonfinite_as_none
from rlhf_core.training.reward.evaluation import agreement_metrics
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

VERIFIABLE_REPLIES = Path(".rlhf") / "verifiable.jsonl"


def run(
    config: EvaluateStageConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, Any]:
    """Compare the policy with SFT, and write metrics, all rows, and the bad cases.

    Bad cases are those where reward and judge disagree.
    The gold judge scores only prompts of the synthetic world. Evaluation sampling makes the replies
    that are judged, the training distribution those that KL and perplexity are measured on. Ranks
    share all passes of models.
    """
    # A mistake in a file that the settings name stops the stage at once.
    sets = FixedSets.read(config, inputs.clean, context.folder)
    sources = config.ppo.reward.sources
    checker = None
    if "judge" not in inputs:
        checker = Checker.of_test_prompts(sources, inputs.clean, context.folder)
    added = added_evaluations(config, sets.judged, context.folder)
    plugged = plugged_judges(config.named_judges, context.folder)
    texts = read_held_out(inputs.clean, config.perplexity.rows)
    frozen = FrozenModels(context.launch)
    replies = 2 * sets.replies(config) + config.best_of_n * len(sets.judged)
    with (
        opened_sampler(config.sampler, context.work, context.folder) as sampler,
        progress(replies, "evaluate") as bar,
    ):
        sft = evaluated_model("sft", inputs.sft, config, sets, added, texts, bar, sampler, frozen)
        policy = evaluated_model(
            "policy", inputs.policy, config, sets, added, texts, bar, sampler, frozen
        )
    evaluation = Evaluation(sets, sft, policy, config)
    with frozen.borrowed(load_policy(inputs.sft, device=frozen.loading)[0]) as reference:
        for model in (sft, policy):
            assert model.on_policy is not None
            model.drift = measure_drift(model.on_policy, reference, evaluation.clusters)
            model.on_policy = None
    del reference
    names = [name for name in ("reward", "referee", "judge") if name in inputs]
    if sets.world:
        names.append("gold")
    for name in names:
        with borrowed_judge(name, inputs, config.batch_size, frozen) as judge:
            evaluation.score(judge)
    given: dict[str, Rival] = {}
    for further in added.values():
        for called, theirs in further.replies().items():
            given[called] = Rival(called, theirs, evaluation)
    rivals = list(given.values())
    best: Rival | None = None
    if sft.candidates:
        with borrowed_judge("reward", inputs, config.batch_size, frozen) as judge:
            best = best_of_n(judge, evaluation, sft.candidates)
        rivals.append(best)
    for name in names if rivals else ():
        with borrowed_judge(name, inputs, config.batch_size, frozen) as judge:
            for rival in rivals:
                rival.score(judge)
    distributed.release_nonzero_ranks()  # what is left runs none of these models
    if checker is not None:
        plugged.insert(0, checker)
        names.append(checker.name)
    compared: list[Evaluation | Rival] = [evaluation, *given.values()]
    for further_judge in plugged:
        for one in compared:
            if isinstance(further_judge, PairwiseJudge):
                one.judge(further_judge)
            else:
                one.score(further_judge)
    # The last judge is the best one there is: gold in the synthetic world, else the one that
    # selected nothing.
    agreement = {}
    if "judge" in inputs:
        of_judge = agreement_metrics(inputs.reward_scores, inputs.judge_scores)
        agreement = {f"judge_{name}": value for name, value in of_judge.items()}
    return write_results(
        evaluation, given, best, added, agreement, names[-1], config, outputs, context
    )


def write_results(
    evaluation: Evaluation,
    given: Mapping[str, Rival],
    best: Rival | None,
    added: Mapping[str, AddedEvaluation],
    agreement: Mapping[str, float],
    last_judge: str,
    config: EvaluateStageConfig,
    outputs: Paths,
    context: RunContext,
) -> dict[str, Any]:
    """Write metrics, rows and bad cases of a finished evaluation; returns the metrics.

    Args:
        evaluation: Both models' replies, which all judges have scored.
        given: Further replies that packages gave, by name, as the judges compared them.
        best: The best of n replies of SFT; None where that was not sampled.
        added: What packages have measured.
        agreement: How far reward model and judge agree on the test pairs; empty without them.
        last_judge: By whose scores cases are bad.
        config: The stage's settings.
        outputs: The files.
        context: Its folder gets the replies behind the metrics.
    """
    sets, sft, policy = evaluation.sets, evaluation.sft, evaluation.policy
    metrics, rows = evaluation.metrics(), evaluation.rows()
    groups = [group_of(prompt, config.groups) for prompt in sets.judged]
    if any(groups):
        metrics["group"] = compare_groups(
            groups, evaluation.outcomes(), config.bootstrap, config.seed, evaluation.clusters
        )
    if agreement:
        metrics["agreement"] = dict(agreement)
    if best is not None:
        metrics["best_of_n"] = best.best_of_n_metrics(sft.candidates)
    for rival in (*given.values(), *([best] if best else [])):
        first_rows = rows[:: config.replies_per_prompt]
        for row, columns in zip(first_rows, rival.columns(), strict=True):
            row.update(columns)
    samples = [outputs.comparisons, outputs.bad_cases]
    samples += save_counted_replies(evaluation, context.folder / ".rlhf")
    if config.verifiable is not None:
        checked = sft.verifiable, policy.verifiable
        metrics["verifiable"] = sets.verifiable.metrics(*checked, config.bootstrap, config.seed)
        samples.append(context.folder / VERIFIABLE_REPLIES)
        atomic_write_lines(samples[-1], sets.verifiable.rows(*checked))
    for name, further in added.items():
        added_into(metrics, further.metrics(given, groups))
        if kept := further.rows():
            samples.append(context.folder / ".rlhf" / f"{name}.jsonl")
            atomic_write_lines(samples[-1], kept)
    write_table(outputs.comparisons, pa.Table.from_pylist(rows))
    bad_cases = evaluation.bad_cases(last_judge)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in bad_cases]
    atomic_write_text(outputs.bad_cases, "".join(lines))
    # A number that is not finite must not cost the others, which took hours.
    finite: dict[str, Any] = nonfinite_as_none(metrics)
    atomic_write_json(outputs.metrics, finite)
    for path in samples:
        context.tracker.log_artifact(path, "samples")
    return finite


STAGE = Stage(
    name="evaluate",
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
        "reward_scores": "samples/reward_scores.json",
        "judge_scores": "samples/judge_scores.json",
        "reward_sources": REWARD_SOURCES_FILE,
    },
    outputs={
        "metrics": "metrics/evaluation.json",
        "comparisons": "samples/comparisons.parquet",
        "bad_cases": "samples/bad_cases.jsonl",
    },
    optional_inputs=frozenset({"reward_sources"}),
)


def save_counted_replies(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write what drift, perplexity, regression and safety are counted of; return the files."""
    kept = {
        folder / "drift.jsonl": evaluation.drift_rows(),
        folder / "perplexity.jsonl": evaluation.held_out_rows(),
        folder / "regression.jsonl": evaluation.checked_rows("regression"),
        folder / "safety.jsonl": evaluation.checked_rows("safety"),
    }
    for path, rows in kept.items():
        atomic_write_lines(path, [nonfinite_as_none(row) for row in rows])
    return list(kept)


def evaluated_model(
    side: str,
    folder: Path,
    config: EvaluateStageConfig,
    sets: FixedSets,
    added: Mapping[str, AddedEvaluation],
    texts: HeldOutText,
    bar: Progress,
    sampler: Sampler,
    frozen: FrozenModels,
) -> EvaluatedModel:
    """Sample from one of the two models, which is in memory only meanwhile.

    Both models get the same random numbers.

    Args:
        side: ``sft``, which also samples what the best of n is chosen from, or ``policy``.
        folder: The model and its tokenizer.
        config: The stage's settings.
        sets: The prompts.
        added: What packages measure of the model.
        texts: Held-out text.
        bar: Advanced by one for each reply of the evaluation's sampling.
        sampler: Samples all replies; it lets go of the model again.
        frozen: Places the model.
    """
    loaded, tokenizer = load_policy(folder, device=frozen.loading)
    size, messages = config.batch_size, [row.prompt for row in sets.judged]
    sampling = Sampling.for_tokenizer(
        tokenizer, config.max_new_tokens, config.ppo.temperature, config.ppo.min_new_tokens
    )
    with frozen.borrowed(loaded) as model:
        # First: what it refuses would otherwise be refused after hours.
        for evaluation in added.values():
            evaluation.measure(side, model, tokenizer, size)
        sampler.sync(model, 0)
        evaluated = sample_sets(model, tokenizer, sets, config, bar.advance, sampler)
        evaluated.on_policy = on_policy_replies(
            model,
            tokenizer,
            messages[: config.kl_samples],
            sampling,
            config.seed + 1,
            size,
            sampler,
        )
        evaluated.held_out = score_held_out(model, tokenizer, texts, config.perplexity)
        for number in range(config.best_of_n if side == "sft" else 0):
            seed = derive_seed(config.seed, "evaluate", "best_of_n", number)
            evaluated.candidates.append(
                evaluation_replies(
                    model, tokenizer, messages, config.sampling, seed, bar.advance, size, 1, sampler
                )
            )
        sampler.release()
    return evaluated

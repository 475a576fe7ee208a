"""Reward: the model of human preference that PPO optimises against, judged by more than accuracy.

The stages of referee and judge train and evaluate their models by the same function, each on pairs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from rlhf_core.api.reward_model import train_reward_model
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.splits import PairUser
from rlhf_core.models.starting.base import fitting_length, load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_dir, atomic_write_json, atomic_write_lines
from rlhf_core.training.reward.evaluation import bag_of_words_accuracy
from rlhf_core.training.reward.results import draw_reward_plots, worst_mistakes
from rlhf_core.training.reward.run import RewardModelRun, metric_prefix, read_split, write_scores
from rlhf_core.training.run_context import RunContext

# Further metrics of a finished run, and files that describe it.
Describe = Callable[[RewardModelRun, Paths, RunContext], dict[str, float]]


def run_reward_stage(
    config: RewardConfig,
    inputs: Paths,
    outputs: Paths,
    context: RunContext,
    *,
    name: str,
    pairs: PairUser,
    describe: Describe | None = None,
) -> dict[str, object]:
    """Train a scalar model on preference pairs and write its folder, history, test rewards and metrics.

    Args:
        name: The stage's name, which sets its random streams apart.
        pairs: Folder of the clean data with the training and validation pairs. The test pairs are common to all models
            (``preferences``), so that their rewards can be compared.
        describe: Adds metrics and files of its own.

    Returns:
        Metrics of the validation split under plain names and of the test split after ``test_``.
    """
    init = inputs[config.init]
    tokenizer = load_tokenizer(init)
    folders = {"train": pairs, "validation": pairs, "test": PairUser.REWARD}
    longest = fitting_length(config.max_tokens, init)
    splits = {
        split: read_split(inputs.clean / folder / f"{split}.parquet", tokenizer, longest, context.tokens)
        for split, folder in folders.items()
    }
    train = splits.pop("train")
    trained = train_reward_model(init, tokenizer, train, **splits, config=config, context=context, name=name)
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    write_scores(outputs.scores, trained.run.scores["test"], splits["test"])
    described = describe(trained.run, outputs, context) if describe is not None else {}
    metrics = trained.metrics | described
    atomic_write_json(outputs.metrics, metrics)
    return metrics


def plots_and_baseline(run: RewardModelRun, outputs: Paths, context: RunContext) -> dict[str, float]:
    """Draw margins and calibration, write the worst mistakes on the test pairs, and return what a bag of words
    reaches on the same pairs.
    """
    atomic_write_lines(outputs.mistakes, worst_mistakes(run.scores["test"], run.held_out["test"]))
    with atomic_dir(outputs.plots) as plots:
        margins = {name: scored.margins for name, scored in run.scores.items()}
        draw_reward_plots(plots, margins)
    for plot in sorted(outputs.plots.glob("*.svg")):
        context.tracker.log_artifact(plot, "plots")
    accuracies = bag_of_words_accuracy(run.train.rows, {name: split.rows for name, split in run.held_out.items()})
    return {f"{metric_prefix(name)}baseline_bow": accuracy for name, accuracy in accuracies.items()}


def reward_stage(
    name: str,
    config: type[RewardConfig],
    pairs: PairUser,
    describe: Describe | None = None,
    described: Mapping[str, str] | None = None,
) -> Stage[RewardConfig]:
    """The stage of a scalar model; ``described`` are the outputs that ``describe`` writes."""
    outputs = {
        "model": f"models/{name}",
        "metrics": f"metrics/{name}.json",
        "history": f"history/{name}.jsonl",
        "scores": f"samples/{name}_scores.json",
    }
    return Stage(
        name=name,
        section=name,
        config=config,
        run=partial(run_reward_stage, name=name, pairs=pairs, describe=describe),
        inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base", "pass_": "gates/sft.pass"},
        outputs=outputs | dict(described or {}),
    )


DESCRIBED = {"plots": "plots/reward", "mistakes": "samples/reward_mistakes.jsonl"}
STAGE = reward_stage("reward", RewardConfig, PairUser.REWARD, plots_and_baseline, DESCRIBED)

"""Reward: the model of human preference that PPO optimises against, judged by more than accuracy."""

from __future__ import annotations

from rlhf_core.config.reward import RewardConfig
from rlhf_core.files import atomic_dir, atomic_write_json
from rlhf_core.models.base import load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.tracking import Tracker
from rlhf_core.training.reward.baselines import bag_of_words_accuracy
from rlhf_core.training.reward.plots import draw_reward_plots
from rlhf_core.training.reward.run import (
    evaluate_splits,
    prefix,
    read_split,
    train_scalar,
    write_history,
    write_scores,
)

STAGE = Stage(
    name="reward",
    section="reward",
    config=RewardConfig,
    inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base"},
    outputs={
        "model": "models/reward",
        "metrics": "metrics/reward.json",
        "history": "history/reward.jsonl",
        "plots": "plots/reward",
        "scores": "samples/reward_scores.json",
    },
)


def run(config: RewardConfig, inputs: Paths, outputs: Paths, tracker: Tracker) -> dict[str, object]:
    """Write ``models/reward``, metrics of the validation (plain names) and test split (``test_``), history, plots."""
    init = inputs[config.init]
    tokenizer = load_tokenizer(init)
    folder = inputs.clean / "preferences"
    names = ("train", "validation", "test")
    splits = {name: read_split(folder / f"{name}.parquet", tokenizer, config.max_tokens) for name in names}
    trained = train_scalar(config, "reward", init, splits["train"], splits["validation"], outputs.work, tracker)
    trained.save(outputs.model)
    write_history(outputs.history, trained)

    held_out = {name: splits[name] for name in names[1:]}
    metrics, scores = evaluate_splits(trained, splits["train"], held_out)
    words = bag_of_words_accuracy(splits["train"].rows, {name: split.rows for name, split in held_out.items()})
    metrics |= {f"{prefix(name)}baseline_bow": accuracy for name, accuracy in words.items()}
    write_scores(outputs.scores, scores["test"], held_out["test"])
    with atomic_dir(outputs.plots) as plots:
        draw_reward_plots(plots, {name: scored.margins for name, scored in scores.items()}, trained.result.history)
    for plot in sorted(outputs.plots.glob("*.png")):
        tracker.log_artifact(plot, "plots")
    atomic_write_json(outputs.metrics, metrics)
    return metrics

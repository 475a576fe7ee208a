"""Reward: the model of human preference that PPO optimises against, judged by more than accuracy.

Referee and judge are reward models too, trained and evaluated by the same function on disjoint
pairs. The referee selects checkpoints, and no reward source uses it. The judge judges what is done:
nothing is trained or selected by it.

The stage reward alone draws margins and calibration, and writes the pairs that its model gets most
wrong. Many of those (Zheng et al. 2023, "Secrets of RLHF", table 1) are mislabelled or ambiguous;
the rest show what the model does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from rlhf_core.api.reward_model import TrainedRewardModel, train_reward_model
from rlhf_core.config.reward import JudgeConfig, RefereeConfig, RewardConfig
from rlhf_core.data.schema import PairUser
from rlhf_core.data.statistics import cluster_of
from rlhf_core.models.causal_lm import fitting_length, load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_dir, atomic_write_json, atomic_write_lines
from rlhf_core.training.reward.evaluation import bag_of_words_accuracy, calibration_bins
from rlhf_core.training.reward.run import Split, metric_prefix, read_split, write_scores
from rlhf_core.training.reward.trainer import PairScores
from rlhf_core.training.run_context import RunContext

# Further metrics of a trained model and the splits that it was trained and scored on, and files
# that describe it.
Describe = Callable[[TrainedRewardModel, Mapping[str, Split], Paths, RunContext], dict[str, float]]


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
    """Train a scalar model on preference pairs, and write it with history and metrics.

    Args:
        name: The stage's name, which sets its random streams apart.
        pairs: Whose training and validation pairs it takes, see :func:`read_splits`.
        describe: Adds metrics and files of its own.

    Returns:
        Metrics of the validation split under plain names and of the test split after ``test_``.
    """
    init = inputs[config.init]
    tokenizer = load_tokenizer(init)
    splits = read_splits(inputs.clean, pairs, config, init, tokenizer, context.tokens)
    trained = train_reward_model(
        init,
        tokenizer,
        splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        config=config,
        context=context,
        name=name,
        allow_high_learning_rates=True,  # params.yaml was checked as a whole
    )
    trained.save(outputs.model)
    atomic_write_lines(outputs.history, trained.history)
    write_scores(outputs.scores, trained.scores["test"], splits["test"])
    kept = context.folder / ".rlhf"
    atomic_write_lines(
        kept / f"{name}_validation.jsonl",
        validation_rows(trained.scores["validation"], splits["validation"]),
    )
    atomic_write_lines(kept / f"{name}_probes.jsonl", probe_rows(trained, tokenizer))
    metrics = trained.metrics
    if describe is not None:
        metrics = metrics | describe(trained, splits, outputs, context)
    atomic_write_json(outputs.metrics, metrics)
    return metrics


def read_splits(
    clean: Path,
    pairs: PairUser,
    config: RewardConfig,
    init: Path,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Path | None,
) -> dict[str, Split]:
    """Read the splits of a model that starts from ``init``.

    The test pairs are common to all models, so that their rewards can be compared.

    Raises:
        DataError: No pair of a split is within ``max_tokens``.
    """
    longest = fitting_length(config.max_tokens, init)
    folders = {"train": pairs, "validation": pairs, "test": PairUser.REWARD}
    splits = {}
    for split, folder in folders.items():
        path = clean / folder / f"{split}.parquet"
        splits[split] = read_split(path, tokenizer, longest, tokens)
    return splits


def plots_and_baseline(
    trained: TrainedRewardModel, splits: Mapping[str, Split], outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Draw margins and calibration, and write the worst mistakes on the test pairs.

    Returns:
        What a bag of words reaches on the same pairs.
    """
    atomic_write_lines(outputs.mistakes, worst_mistakes(trained.scores["test"], splits["test"]))
    with atomic_dir(outputs.plots) as plots:
        draw_reward_plots(plots, {name: scored.margins for name, scored in trained.scores.items()})
    for plot in sorted(outputs.plots.glob("*.svg")):
        context.tracker.log_artifact(plot, "plots")
    scored = {name: splits[name].rows for name in trained.scores}
    accuracies = bag_of_words_accuracy(splits["train"].rows, scored)
    return {f"{metric_prefix(name)}baseline_bow": accuracy for name, accuracy in accuracies.items()}


def reward_stage(
    name: str,
    config: type[RewardConfig],
    pairs: PairUser,
    describe: Describe | None = None,
    described: Mapping[str, str] | None = None,
) -> Stage[RewardConfig]:
    """Return the stage of a scalar model.

    Args:
        described: The outputs that ``describe`` writes.
    """
    outputs = {
        "model": f"models/{name}",
        "metrics": f"metrics/{name}.json",
        "history": f"history/{name}.jsonl",
        "scores": f"samples/{name}_scores.json",
    }
    return Stage(
        name=name,
        config=config,
        run=partial(run_reward_stage, name=name, pairs=pairs, describe=describe),
        inputs={
            "clean": "data/clean",
            "sft": "models/sft",
            "base": "models/base",
            "pass_": "gates/sft.pass",
        },
        outputs=outputs | dict(described or {}),
    )


DESCRIBED = {"plots": "plots/reward", "mistakes": "samples/reward_mistakes.jsonl"}
STAGE = reward_stage("reward", RewardConfig, PairUser.REWARD, plots_and_baseline, DESCRIBED)
REFEREE = reward_stage("referee", RefereeConfig, PairUser.REFEREE)
JUDGE = reward_stage("judge", JudgeConfig, PairUser.JUDGE)


SIZE = (4.6, 3.0)  # inches; the letters are then as large as those of the report


def draw_reward_plots(folder: Path, margins: Mapping[str, np.ndarray]) -> None:
    """Write ``margins.svg`` and ``calibration.svg`` into ``folder``.

    Args:
        margins: By split, the margin of each pair (B,).
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = np.concatenate(list(margins.values()))
    edges = list(np.linspace(every.min(), max(every.max(), every.min() + 1e-6), 41))
    title = "Reward margin of the preferred reply"
    with _plot(folder / "margins.svg", title, "r(chosen) - r(rejected)") as axes:
        for split, values in margins.items():
            label = f"{split}, mean {values.mean():z.2f}"
            axes.hist(values, bins=edges, alpha=0.55, density=True, label=label)
        axes.axvline(0.0, color="black", linewidth=1)
        axes.set(ylabel="density")
    with _plot(folder / "calibration.svg", "Calibration", "confidence: sigma(|margin|)") as axes:
        axes.plot([0.5, 1.0], [0.5, 1.0], color="black", linewidth=1, label="perfect")
        for split, values in margins.items():
            confidence, correct, _ = zip(*calibration_bins(values), strict=True)
            axes.plot(confidence, correct, marker="o", label=split)
        axes.set(ylabel="share ranked as people did")


@contextmanager
def _plot(path: Path, title: str, xlabel: str) -> Iterator[Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    yield axes
    axes.set(title=title, xlabel=xlabel)
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reward"}):
        # No software version or date inside: the same numbers give the same file.
        figure.savefig(path, metadata={"Creator": None, "Date": None})


def validation_rows(scores: PairScores, split: Split) -> list[dict[str, Any]]:
    """Return both rewards and lengths in tokens of each validation pair.

    Accuracy, margins, calibration and length bias are counted of this.
    """
    rows = []
    for row, pair, chosen, rejected in zip(
        split.rows, split.pairs, scores.chosen.tolist(), scores.rejected.tolist(), strict=True
    ):
        rows.append(
            {
                "id": row.id,
                "category": row.category,
                "cluster": cluster_of(row),
                "chosen": chosen,
                "rejected": rejected,
                "chosen_tokens": len(pair.chosen),
                "rejected_tokens": len(pair.rejected),
            }
        )
    return rows


def probe_rows(
    trained: TrainedRewardModel, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return both replies and rewards of each pair of the probes, which these are counted of."""
    probes, scores = trained.probes, trained.probe_scores
    rows = []
    for number, pair in enumerate(probes.pairs):
        rows.append(
            {
                "kind": probes.kinds[number],
                "cluster": int(probes.clusters[number]),
                "prompt": tokenizer.decode(list(pair.prompt)),
                "better_reply": tokenizer.decode(list(pair.chosen)),
                "worse_reply": tokenizer.decode(list(pair.rejected)),
                "better": float(scores.chosen[number]),
                "worse": float(scores.rejected[number]),
            }
        )
    return rows


MOST_MISTAKES = 10


def worst_mistakes(scores: PairScores, split: Split) -> list[dict[str, Any]]:
    """Return the pairs that were ranked most wrongly, worst first."""
    mistakes = []
    for i in np.argsort(scores.margins, kind="stable")[:MOST_MISTAKES].tolist():
        if not scores.margins[i] < 0:  # NaN, which is sorted last, is no mistake
            break
        row, pair = split.rows[i], split.pairs[i]
        mistake = {
            "id": row.id,
            "category": row.category,
            "prompt": "\n".join(f"{message.role}: {message.content}" for message in row.prompt),
            "chosen": row.chosen,
            "rejected": row.rejected,
            "margin": float(scores.margins[i]),
            "reward_chosen": float(scores.chosen[i]),
            "reward_rejected": float(scores.rejected[i]),
            "tokens_chosen": len(pair.chosen),
            "tokens_rejected": len(pair.rejected),
        }
        mistakes.append(mistake)
    return mistakes

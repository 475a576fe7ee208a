"""Referee: a second reward model on disjoint pairs. It chooses checkpoints and judges; nothing optimises against it."""

from __future__ import annotations

import json

import numpy as np

from rlhf_core.config.reward import RefereeConfig
from rlhf_core.files import atomic_write_json, atomic_write_text
from rlhf_core.models.base import load_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.stages.contract import Paths, Stage
from rlhf_core.tracking import Tracker
from rlhf_core.training.reward import PairScores
from rlhf_core.training.reward_evaluation import agreement, linear_correlation, rank_correlation
from rlhf_core.training.reward_run import (
    read_split,
    score_split,
    split_categories,
    split_figures,
    train_scalar,
    training_figures,
)

STAGE = Stage(
    name="referee",
    section="referee",
    config=RefereeConfig,
    inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base", "reward": "models/reward"},
    outputs={"model": "models/referee", "metrics": "metrics/referee.json", "history": "history/referee.jsonl"},
)


def run(config: RefereeConfig, inputs: Paths, outputs: Paths, tracker: Tracker) -> dict[str, object]:
    """Write ``models/referee``, history, and metrics: those of a reward model, and agreement with the reward model.

    Training and validation pairs are the referee's own; the test pairs are common.
    """
    init = inputs[config.init]
    tokenizer = load_tokenizer(init)
    own = inputs.clean / "preferences_referee"
    train, validation = (
        read_split(own / f"{name}.parquet", tokenizer, config.max_tokens) for name in ("train", "validation")
    )
    test = read_split(inputs.clean / "preferences" / "test.parquet", tokenizer, config.max_tokens)
    trained = train_scalar(config, "referee", init, train, validation, outputs.work, tracker)
    trained.model.save(outputs.model, tokenizer)
    atomic_write_text(outputs.history, "".join(json.dumps(record) + "\n" for record in trained.result.history))

    metrics: dict[str, object] = dict(training_figures(trained, train))
    scores = {}
    for prefix, split in (("", validation), ("test_", test)):
        scores[prefix] = score_split(trained.model, split, tokenizer)
        metrics |= {f"{prefix}{key}": value for key, value in split_figures(scores[prefix], split).items()}
        metrics[f"{prefix}category"] = split_categories(scores[prefix], split)
    metrics |= agreement_figures(scores["test_"], score_split(ScalarModel.load(inputs.reward), test, tokenizer))
    atomic_write_json(outputs.metrics, metrics)
    return metrics


def agreement_figures(referee: PairScores, reward: PairScores) -> dict[str, float]:
    """How far two models agree on the same pairs: share ranked alike, and correlations over all replies and margins."""
    first = np.concatenate([referee.chosen, referee.rejected])
    second = np.concatenate([reward.chosen, reward.rejected])
    return {
        "agreement": agreement(referee.margins, reward.margins),
        "score_correlation": linear_correlation(first, second),
        "score_rank_correlation": rank_correlation(first, second),
        "margin_correlation": linear_correlation(referee.margins, reward.margins),
    }

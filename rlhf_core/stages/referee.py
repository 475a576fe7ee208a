"""Referee: a second reward model on disjoint pairs. It chooses checkpoints and judges; nothing optimises against it."""

from __future__ import annotations

import json

from rlhf_core.config.reward import RefereeConfig
from rlhf_core.files import atomic_write_json, atomic_write_text
from rlhf_core.models.base import load_tokenizer
from rlhf_core.stages.contract import Paths, Stage
from rlhf_core.tracking import Tracker
from rlhf_core.training.reward_run import (
    read_split,
    score_split,
    split_categories,
    split_figures,
    train_scalar,
    training_figures,
    write_scores,
)

STAGE = Stage(
    name="referee",
    section="referee",
    config=RefereeConfig,
    inputs={"clean": "data/clean", "sft": "models/sft", "base": "models/base"},
    outputs={
        "model": "models/referee",
        "metrics": "metrics/referee.json",
        "history": "history/referee.jsonl",
        "scores": "samples/referee_scores.json",
    },
)


def run(config: RefereeConfig, inputs: Paths, outputs: Paths, tracker: Tracker) -> dict[str, object]:
    """Write ``models/referee``, history, and the metrics of a reward model.

    Training and validation pairs are the referee's own; the test pairs are common, and its rewards of them are kept
    for the comparison with the reward model.
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
    write_scores(outputs.scores, scores["test_"], test)
    atomic_write_json(outputs.metrics, metrics)
    return metrics

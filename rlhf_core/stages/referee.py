"""Referee: a second reward model on disjoint pairs. It chooses checkpoints and judges; nothing optimises against it."""

from __future__ import annotations

from rlhf_core.config.reward import RefereeConfig
from rlhf_core.files import atomic_write_json
from rlhf_core.models.base import load_tokenizer
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.tracking import Tracker
from rlhf_core.training.reward.run import evaluate_splits, read_split, train_scalar, write_history, write_scores

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
    trained.save(outputs.model)
    write_history(outputs.history, trained)
    metrics, scores = evaluate_splits(trained, train, {"validation": validation, "test": test})
    write_scores(outputs.scores, scores["test"], test)
    atomic_write_json(outputs.metrics, metrics)
    return metrics

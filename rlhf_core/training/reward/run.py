"""One training of a scalar model on preference pairs, from files to scored splits: the reward model and the referee."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.chat import pad_id
from rlhf_core.data.pairs import TokenisedPair, tokenised_pairs
from rlhf_core.data.schema import Preference, read_rows
from rlhf_core.errors import DataError
from rlhf_core.files import atomic_write_json, atomic_write_text
from rlhf_core.models import shared_base
from rlhf_core.models.base import load_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.lora import merge_adapters
from rlhf_core.models.shared_base import Adapters, adapters_of
from rlhf_core.tracking import Tracker
from rlhf_core.training.engine.choice import build_engine, finish
from rlhf_core.training.loop import Loop, LoopResult, LoopSettings
from rlhf_core.training.reward.evaluation import accuracy_by_category, evaluate_scores
from rlhf_core.training.reward.trainer import PairScores, RewardTask, score_pairs
from rlhf_core.training.rng import derive_seed


@dataclass(frozen=True)
class Split:
    """The usable pairs of one file: rows and their tokens, in the same order, and how many were dropped and why."""

    rows: list[Preference]
    pairs: list[TokenisedPair]
    dropped: dict[str, int]


@dataclass(frozen=True)
class TrainedScalar:
    """A trained model with its tokenizer and the course of its training."""

    model: ScalarModel
    tokenizer: PreTrainedTokenizerBase
    result: LoopResult
    skipped_steps: int
    adapters: Adapters | None = None

    def save(self, path: Path) -> None:
        """The model's folder, with its adapters where it was trained by them."""
        if self.adapters is None:
            self.model.save(path, self.tokenizer)
            return
        settings, tensors = self.adapters.settings(), self.adapters.tensors
        self.model.save(path, self.tokenizer, {shared_base.SETTINGS: settings}, {shared_base.TENSORS: tensors})


def read_split(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Split:
    """Pairs of a parquet file as tokens; ``DataError`` when none is usable."""
    rows = read_rows(path, Preference)
    pairs, dropped = tokenised_pairs(tokenizer, rows, max_tokens)
    if not pairs:
        raise DataError(
            f"{path} has no usable pair: of {len(rows)}, {dropped['over_long']} exceed max_tokens {max_tokens} "
            f"and {dropped['identical']} have two equal replies; raise max_tokens or look at the data"
        )
    return Split([rows[pair.row] for pair in pairs], pairs, dropped)


def train_scalar(
    config: RewardConfig, name: str, init: Path, train: Split, validation: Split, work: Path, tracker: Tracker
) -> TrainedScalar:
    """Train a scalar model from the causal LM at ``init``. ``name`` sets its random streams apart.

    Of several ranks only the first returns.
    """
    tokenizer = load_tokenizer(init)
    model = ScalarModel.from_causal_lm(init, derive_seed(config.seed, name, "head"))
    if config.lora is not None:
        model.add_adapters(config.lora, derive_seed(config.seed, name, "lora"))
    engine = build_engine(model, config.optimizer, config.steps, name)
    margins = [row.margin or 0.0 for row in train.rows] if config.use_margin else None
    task = RewardTask(engine, model, train.pairs, validation.pairs, config, pad_id(tokenizer), name, margins)
    settings = LoopSettings(name, config.seed, config.steps, config.eval_every, config.checkpoint)
    result = Loop(engine, task, settings, work, tracker).run()
    model = finish(engine, model)
    adapters = None
    if config.lora is not None:
        adapters = adapters_of(model, config.lora, init)
        merge_adapters(model)
    return TrainedScalar(model, tokenizer, result, engine.skipped_steps, adapters)


def evaluate_splits(
    trained: TrainedScalar, train: Split, held_out: Mapping[str, Split]
) -> tuple[dict[str, object], dict[str, PairScores]]:
    """Figures of the training and of each held-out split, and the rewards behind them by split.

    Those of ``test`` have that word before their names.
    """
    metrics: dict[str, object] = dict(training_figures(trained, train))
    scores = {}
    for name, split in held_out.items():
        found = scores[name] = score_pairs(trained.model, split.pairs, pad_id(trained.tokenizer))
        figures = evaluate_scores(found.chosen, found.rejected, *reply_lengths(split.pairs))
        metrics |= {f"{prefix(name)}{key}": value for key, value in figures.items()}
        categories = accuracy_by_category(found.margins, [row.category for row in split.rows])
        metrics[f"{prefix(name)}category"] = categories
    return metrics, scores


def prefix(split: str) -> str:
    """What stands before the names of a held-out split's figures."""
    return "test_" if split == "test" else ""


def write_history(path: Path, trained: TrainedScalar) -> None:
    """One line of JSON for each record of the training's course."""
    atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in trained.result.history))


def reply_lengths(pairs: Sequence[TokenisedPair]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the chosen and of the rejected replies, end-of-sequence included."""
    return np.array([len(pair.chosen) for pair in pairs]), np.array([len(pair.rejected) for pair in pairs])


def training_figures(trained: TrainedScalar, train: Split) -> dict[str, float]:
    """Size, speed and losses of rows of a training run."""
    return {
        "train_pairs": float(len(train.pairs)),
        "dropped_over_long": float(train.dropped["over_long"]),
        "dropped_identical": float(train.dropped["identical"]),
        "tokens_per_second": trained.result.tokens_per_second,
        "skipped_steps": float(trained.skipped_steps),
    }


def write_scores(path: Path, scores: PairScores, split: Split) -> None:
    """Rewards of a split's pairs by row id, for comparison with another model."""
    ids = [row.id for row in split.rows]
    atomic_write_json(path, {"ids": ids, "chosen": scores.chosen.tolist(), "rejected": scores.rejected.tolist()})

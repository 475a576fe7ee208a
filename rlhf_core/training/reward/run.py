"""Training a scalar model on preference pairs, from files to scored splits.

Reward model, referee and judge are trained so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.batches import TokenisedPair, length_balanced_epoch, usable_pairs
from rlhf_core.data.schema import Preference, read_row_table
from rlhf_core.data.statistics import clusters_of
from rlhf_core.data.tables import TableRows
from rlhf_core.data.tokens import TokenTable, pad_id, read_tokens
from rlhf_core.errors import DataError
from rlhf_core.models import shared_base
from rlhf_core.models.adapters import merge_adapters
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.shared_base import Adapters, adapters_of
from rlhf_core.storage.files import atomic_write_json
from rlhf_core.training import loop
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.loop import LoopResult
from rlhf_core.training.reward.evaluation import (
    FEWEST_BALANCED_PAIRS,
    accuracy,
    accuracy_by_category,
    evaluate_scores,
    fitted_temperature,
)
from rlhf_core.training.reward.first_fits import LengthExperts, fit_linear_probe
from rlhf_core.training.reward.trainer import PairBatches, PairScores, RewardTask, rows_of_epoch
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """The usable pairs of one file.

    Attributes:
        rows: Rows, one for each pair.
        pairs: Their tokens, in the same order.
        tokens: Those of all rows of the file.
        dropped: Number of unusable rows by reason.
    """

    rows: Sequence[Preference]
    pairs: TableRows[TokenisedPair]
    tokens: TokenTable
    dropped: dict[str, int]


@dataclass(frozen=True)
class TrainedScalar:
    """A trained scalar model with its tokenizer and the record of its training.

    Attributes:
        adapters: What was trained, where that were adapters on the weights of a folder.
    """

    model: ScalarModel
    tokenizer: PreTrainedTokenizerBase
    result: LoopResult
    adapters: Adapters | None = None
    length_experts: LengthExperts | None = None

    def save(self, path: str | Path) -> None:
        """Save it as a Hugging Face sequence-classification folder.

        The saved copy is checked to compute the same.
        """
        own = self.adapters
        settings = {} if own is None else {shared_base.SETTINGS: own.settings()}
        tensors = {} if own is None else {shared_base.TENSORS: own.tensors}
        self.model.save(Path(path), self.tokenizer, settings, tensors)


def read_split(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int, tokens: Path | None = None
) -> Split:
    """Read the pairs of a parquet file, tokenised by way of the cache in ``tokens``.

    ``DataError`` when none is usable.

    Of several ranks all must call it. Neither rows nor token ids are held as Python's own objects.
    """
    rows = read_row_table(path, Preference)
    return _usable(
        read_tokens(tokens, path, Preference.KIND, tokenizer), rows.of, max_tokens, str(path)
    )


def split_of(
    rows: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, max_tokens: int, name: str
) -> Split:
    """Tokenise pairs; ``DataError`` when none is usable."""
    table = TokenTable.of_rows(tokenizer, Preference.KIND, rows)
    return _usable(table, lambda kept: [rows[row] for row in kept.tolist()], max_tokens, name)


def _usable(
    table: TokenTable, rows_of: Callable[[Any], Sequence[Preference]], max_tokens: int, name: str
) -> Split:
    pairs, dropped = usable_pairs(table, max_tokens)
    if not pairs:
        raise DataError(
            f"{name} has no usable pair: of {len(table)}, {dropped['over_long']} exceed max_tokens {max_tokens} "
            f"and {dropped['identical']} have two equal replies; raise max_tokens or look at the data"
        )
    if dropped["over_long"]:
        logger.warning(
            "%s: %d of %d pairs are longer than %d tokens and were left out",
            name, dropped["over_long"], len(table), max_tokens,
        )  # fmt: skip
    return Split(rows_of(pairs.rows), pairs, table, dropped)


def train_scalar(
    config: RewardConfig,
    name: str,
    init: Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Split,
    validation: Split,
    context: RunContext,
) -> TrainedScalar:
    """Train a scalar model from a causal language model. Of several ranks only rank 0 returns.

    Args:
        name: Sets the random streams of this model apart from those of others.
        init: The causal language model or its folder. Only with a folder are adapters kept apart
            from the weights.
        tokenizer: Its tokenizer.

    Raises:
        DataError: The pairs are to be balanced by length, and too few of them can be, or a category
            that has a share of them has none.
    """
    if config.length_balance == "sampling":
        require_balanced_pairs(train, config.batch.min_pairs, name)
    first_rows = rows_of_epoch(train.pairs, config, name, epoch=0)
    config = within_epochs(config, train.pairs, name)
    head_seed = derive_seed(config.seed, name, "head")
    model = ScalarModel.from_causal_lm(
        init, head_seed, layers=config.layers, pooling=config.pooling
    )
    margins = np.zeros(len(train.rows))
    if config.use_margin:
        margins = np.array([row.margin or 0.0 for row in train.rows], dtype=np.float64)
    experts = None
    if config.length_balance == "product_of_experts":
        lengths, categories = reply_lengths(train.pairs), [pair.category for pair in train.pairs]
        experts = LengthExperts.fitted(*lengths, categories, config.category_shares)
        margins -= experts.log_odds(*lengths, categories)
    if config.linear_probe is not None:
        probed = [train.pairs[row] for row in first_rows]
        fit_linear_probe(
            model, probed, -margins[first_rows], config.linear_probe, pad_id(tokenizer), name
        )
    if config.lora is not None:
        model.add_adapters(config.lora, derive_seed(config.seed, name, "lora"))
    pad, limit = pad_id(tokenizer), context.launch.logits_bytes
    offsets = margins.tolist() if margins.any() else None

    def task(engine: Engine) -> RewardTask:
        return RewardTask(
            engine, model, train.pairs, validation.pairs, config, pad, name, offsets, limit
        )

    model, result = loop.train(model, task, config, name, config.seed, context)
    adapters = None
    if config.lora is not None:
        if isinstance(init, Path):
            adapters = adapters_of(model, config.lora, init)
        merge_adapters(model)
    return TrainedScalar(model, tokenizer, result, adapters, experts)


def within_epochs(config: RewardConfig, pairs: Sequence[TokenisedPair], name: str) -> RewardConfig:
    """Return the settings with as many steps as ``max_epochs`` of these pairs allow."""
    if config.max_epochs is None:
        return config
    batches = PairBatches(pairs, config, name).batches_of_epoch(0)
    return loop.within_epochs(config, len(batches), name)


def require_balanced_pairs(train: Split, fewest: int, name: str) -> None:
    """Refuse data of which an epoch of length-balanced pairs would be too small."""
    left = pairs_of_balanced_epoch(train)
    if left < fewest:
        differences = [pair.length_difference for pair in train.pairs]
        longer = sum(difference > 0 for difference in differences)
        shorter = sum(difference < 0 for difference in differences)
        raise DataError(
            f"{name}.length_balance: sampling leaves {left} of {len(train.pairs)} training pairs, fewer than the "
            f"{fewest} of a batch: {longer} prefer the longer reply, {shorter} the shorter one; add pairs, or set "
            f"{name}.length_balance: none"
        )


def pairs_of_balanced_epoch(train: Split) -> int:
    """Count the pairs of an epoch that is balanced by length; every draw has as many."""
    return len(
        length_balanced_epoch([pair.length_difference for pair in train.pairs], seed=0, epoch=0)
    )


def quality_metrics(
    trained: TrainedScalar,
    train: Split,
    held_out: Mapping[str, Split],
    scores: Mapping[str, PairScores],
    seed: int,
) -> dict[str, object]:
    """Size and speed of training, and the quality on each held-out split.

    Names of ``test`` begin with that.

    Args:
        held_out: Splits by name, ``validation`` among them.
        scores: Rewards of their pairs.
        seed: Draws the length-balanced pairs of each split: models of one seed are measured on the
            same ones.
    """
    result, temperature = trained.result, fitted_temperature(scores["validation"].margins)
    padding = result.mean("padding_share")
    metrics: dict[str, object] = {
        "train_pairs": float(len(train.pairs)),
        "train_length_balanced_pairs": float(pairs_of_balanced_epoch(train)),
        "dropped_over_long": float(train.dropped["over_long"]),
        "dropped_identical": float(train.dropped["identical"]),
        "over_long_identical_if_cut": float(train.dropped["identical_if_cut"]),
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": float(result.skipped_steps),
        **({} if padding is None else {"padding_share": padding}),
        "temperature": temperature,
    }
    for name, split in held_out.items():
        rewards, prefix, lengths = scores[name], metric_prefix(name), reply_lengths(split.pairs)
        # The temperature was fitted on the validation pairs.
        fitted = None if name == "validation" else temperature
        balancing = derive_seed(seed, "length_balanced", name)
        asked = clusters_of(split.rows)
        quality = evaluate_scores(
            rewards.chosen, rewards.rejected, *lengths, balancing, fitted, asked
        )
        if "accuracy_length_balanced" not in quality:
            logger.warning(
                "%s pairs: %d can be balanced by length and %d are needed; %saccuracy_length_balanced is left out",
                name, quality["length_balanced_pairs"], FEWEST_BALANCED_PAIRS, prefix,
            )  # fmt: skip
        metrics |= {f"{prefix}{key}": value for key, value in quality.items()}
        categories = [row.category for row in split.rows]
        if trained.length_experts is not None:
            log_odds = trained.length_experts.log_odds(*lengths, categories)
            metrics[f"{prefix}accuracy_with_length_expert"] = accuracy(rewards.margins + log_odds)
        metrics[f"{prefix}category"] = accuracy_by_category(rewards.margins, categories)
    return metrics


def metric_prefix(split: str) -> str:
    """What the names of a held-out split's metrics begin with."""
    return "test_" if split == "test" else ""


def reply_lengths(pairs: Sequence[TokenisedPair]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths in tokens of the chosen and of the rejected replies, end-of-sequence included."""
    chosen = [len(pair.chosen) for pair in pairs]
    rejected = [len(pair.rejected) for pair in pairs]
    return np.array(chosen), np.array(rejected)


def write_scores(path: Path, scores: PairScores, split: Split) -> None:
    """Write the rewards of a split's pairs by row id, for comparison with another model."""
    ids = [row.id for row in split.rows]
    atomic_write_json(
        path, {"ids": ids, "chosen": scores.chosen.tolist(), "rejected": scores.rejected.tolist()}
    )

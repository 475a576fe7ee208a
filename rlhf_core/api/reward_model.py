"""Training a reward model on preference pairs, from a causal language model that is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import (
    checked_tokenizer,
    pairs_of,
    require_type,
    run_context,
    with_safe_rates,
)
from rlhf_core.config.reward import PairBatchConfig, RewardConfig
from rlhf_core.data.schema import Preference
from rlhf_core.data.tokens import pad_id
from rlhf_core.models.causal_lm import fitting_length
from rlhf_core.models.given import require_plain
from rlhf_core.models.precision import plain_arithmetic
from rlhf_core.training.reward.probes import Probes, probe_metrics, probes_of, score_probes
from rlhf_core.training.reward.run import Split, TrainedScalar, quality_metrics, train_scalar
from rlhf_core.training.reward.trainer import PairScores, score_pairs
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True, kw_only=True)
class TrainedRewardModel(TrainedScalar):
    """A reward model, or a referee.

    Attributes:
        model: Gives a scalar at the last token of prompt and reply.
        tokenizer: Its tokenizer.
        metrics: Accuracy, margins and biases on the validation pairs, and on the test pairs under
            names that begin with ``test_``; pairs used and dropped. Under ``probes`` how often it
            scores a reply above a copy that is worse for one known reason, of the test pairs, or
            without those of the validation pairs (docs/train.md).
        scores: Rewards of the held-out pairs, by the name of their split.
        probes: The pairs of the probes.
        probe_scores: Rewards of these.
    """

    metrics: dict[str, Any]
    scores: Mapping[str, PairScores]
    probes: Probes
    probe_scores: PairScores

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of training, oldest first."""
        return self.result.history


@plain_arithmetic()
def train_reward_model(
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    preferences: Iterable[Preference | Mapping[str, Any]] | Split,
    *,
    validation: Iterable[Preference | Mapping[str, Any]] | Split | None = None,
    test: Split | None = None,
    config: RewardConfig | None = None,
    context: RunContext | None = None,
    name: str = "reward",
    allow_high_learning_rates: bool = False,
) -> TrainedRewardModel:
    """Train a scalar model on preference pairs by pairwise ranking.

    This is algorithms.md §2, and equation 1 of the paper. The same function trains the referee that
    selects PPO's checkpoints: give it other pairs and another ``name``.

    Args:
        model: The causal language model that a head is put on a copy of, or its folder; it is left
            as it is. With a folder, adapters are kept apart from its weights, too.
        tokenizer: Its tokenizer.
        preferences: Records such as ``{"prompt": ..., "chosen": ..., "rejected": ...}``; see
            docs/data-formats.md.
        validation: Held-out pairs; by default every twentieth one.
        test: Further pairs to measure the model on.
        config: Settings; by default one epoch. A learning rate that is left out is one that suits
            the model.
        context: Where to report and to keep partial state; by default nowhere.
        name: Sets the random streams of this model apart from those of others.
        allow_high_learning_rates: Allows a pretrained model rates that usually wreck it.

    Raises:
        ConfigError: A learning rate is far beyond what suits a pretrained model.
        DataError: A record cannot be read, or no pair is usable.
        TrainingPaused: Three steps in a row were not finite.
    """
    require_type(config, RewardConfig, "config")
    require_plain(model, "model")
    tokenizer = checked_tokenizer(tokenizer, model)
    config, pairs, held = pairs_of(
        preferences, validation, config or default_reward_config, tokenizer, model
    )
    config = with_safe_rates(config, model, allow_high_learning_rates)
    margins: list[list[float | None]] = [[], []]
    if config.use_margin:
        margins = [[row.margin for row in split.rows] for split in (pairs, held)]
    inputs = {
        "config": config,
        "preferences": pairs.tokens,
        "validation": held.tokens,
        "margins": margins,
        "model": model,
    }
    with run_context(context, f"train_reward_model {name}", inputs) as run:
        trained = train_scalar(config, name, model, tokenizer, pairs, held, run)
    splits = {"validation": held}
    if test is not None:
        splits["test"] = test
    scores = {}
    for part, each in splits.items():
        doing = f"{name}, scoring {part} pairs"
        scores[part] = score_pairs(trained.model, each.pairs, pad_id(tokenizer), doing)
    metrics = quality_metrics(trained, pairs, splits, scores, config.seed)
    probed = splits.get("test", held).rows
    longest = fitting_length(config.max_tokens, model)
    probes = probes_of(probed, tokenizer, longest, config.seed)
    probe_scores = score_probes(trained.model, tokenizer, probes, name)
    metrics["probes"] = probe_metrics(probes, probe_scores)
    return TrainedRewardModel(
        **vars(trained), metrics=metrics, scores=scores, probes=probes, probe_scores=probe_scores
    )


def default_reward_config(rows: int, model: PreTrainedModel | Path) -> RewardConfig:
    """Return settings for about one epoch that are safe for a pretrained model."""
    pairs = min(32, rows)
    longest = fitting_length(2048, model)
    return RewardConfig(
        steps=math.ceil(rows / pairs),
        max_tokens=longest,
        batch=PairBatchConfig(token_budget=2 * pairs * longest, min_pairs=1, max_pairs=pairs),
    )

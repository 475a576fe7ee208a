"""Direct preference optimisation of a causal language model that is in memory."""

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
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.policy import DpoConfig
from rlhf_core.data.schema import Preference
from rlhf_core.data.tokens import pad_id
from rlhf_core.models.adapters import PeftAdapter
from rlhf_core.models.causal_lm import fitting_length, load_policy, own_copy, save_policy
from rlhf_core.models.given import require_plain
from rlhf_core.models.precision import plain_arithmetic
from rlhf_core.sampling.agreement import require_next_tokens
from rlhf_core.training import dpo
from rlhf_core.training.reward.run import Split
from rlhf_core.training.rng import seed_everything
from rlhf_core.training.run_context import RunContext


@dataclass(frozen=True)
class DpoPolicy:
    """A policy trained by DPO.

    Attributes:
        model: The policy, of the last step, without adapters.
        tokenizer: Its tokenizer, which has a chat template.
        metrics: Loss, accuracy and margin on held-out pairs before and after, pairs used and
            dropped, speed.
        history: The records of training, oldest first.
        adapter: What was trained, with ``lora``; it is merged into ``model``, and saved beside it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    adapter: PeftAdapter | None = None

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a Hugging Face folder, checked to compute the same."""
        save_policy(Path(path), self.model, self.tokenizer, adapter=self.adapter)


@plain_arithmetic()
def train_dpo(
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    preferences: Iterable[Preference | Mapping[str, Any]] | Split,
    *,
    validation: Iterable[Preference | Mapping[str, Any]] | Split | None = None,
    config: DpoConfig | None = None,
    lora: LoraConfig | None = None,
    seed: int = 1,
    context: RunContext | None = None,
    allow_high_learning_rates: bool = False,
) -> DpoPolicy:
    """Train a copy of ``model`` on preference pairs, without a reward model.

    This is DPO (algorithms.md §10; Rafailov et al. 2023).

    Args:
        model: The model to start from, which is the reference too, or its folder. It is left as it
            is.
        tokenizer: Its tokenizer.
        preferences: Records such as ``{"prompt": ..., "chosen": ..., "rejected": ...}``; see
            docs/data-formats.md.
        validation: Held-out pairs; by default every twentieth one.
        config: Settings; by default one epoch. A learning rate that is left out is one that suits
            the model.
        lora: Trains adapters instead of all weights.
        seed: Seed of the order of pairs.
        context: Where to report and to keep partial state; by default nowhere.
        allow_high_learning_rates: Allows a pretrained model rates that usually wreck it.

    Raises:
        ConfigError: A learning rate is far beyond what suits a pretrained model.
        DataError: A record cannot be read, or no pair is usable.
        TrainingPaused: Three steps in a row were not finite.
    """
    require_type(config, DpoConfig, "config")
    require_type(lora, LoraConfig, "lora")
    require_plain(model, "model")
    tokenizer = checked_tokenizer(tokenizer, model)
    config, pairs, held = pairs_of(
        preferences, validation, config or default_dpo_config, tokenizer, model
    )
    config = with_safe_rates(config, model, allow_high_learning_rates, adapters=lora is not None)
    inputs = {
        "config": config,
        "lora": lora,
        "seed": seed,
        "preferences": pairs.tokens,
        "validation": held.tokens,
        "model": model,
    }
    seed_everything(seed)
    with run_context(context, "train_dpo", inputs) as run:
        own = load_policy(model)[0] if isinstance(model, Path) else own_copy(model)
        require_next_tokens(own, str(model) if isinstance(model, Path) else "model")
        trained = dpo.train_dpo(own, pad_id(tokenizer), pairs, held, config, seed, run, lora)
    return DpoPolicy(trained.model, tokenizer, trained.metrics, trained.history, trained.adapter)


def default_dpo_config(rows: int, model: PreTrainedModel | Path) -> DpoConfig:
    """Return settings for about one epoch over ``rows`` pairs."""
    size = min(32, rows)
    return DpoConfig(
        steps=math.ceil(rows / size),
        batch_size=size,
        micro_batch_size=min(size, 4),
        max_tokens=fitting_length(2048, model),
    )

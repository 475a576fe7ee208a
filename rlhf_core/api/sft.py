"""Supervised fine-tuning of a causal language model that is in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.api.inputs import (
    checked_tokenizer,
    held_out,
    require_type,
    run_context,
    with_safe_rates,
)
from rlhf_core.config.base import SftConfig
from rlhf_core.data.schema import Demonstration
from rlhf_core.data.tokens import TokenTable, pad_id
from rlhf_core.errors import DataError
from rlhf_core.models.causal_lm import (
    fitting_length,
    load_policy,
    own_copy,
    save_policy,
    say_router_loss,
)
from rlhf_core.models.given import require_plain
from rlhf_core.models.precision import plain_arithmetic, use_float32_unembedding
from rlhf_core.sampling.agreement import require_next_tokens
from rlhf_core.training import loop
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.engine.factory import device_before
from rlhf_core.training.examples import fitting_examples
from rlhf_core.training.run_context import RunContext
from rlhf_core.training.sft import SftTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftRun:
    """A fine-tuned model.

    Attributes:
        model: The model, on the device where it was trained.
        tokenizer: Its tokenizer, which has a chat template.
        metrics: Held-out perplexity before and after, losses, rows used and dropped, speed.
        history: The records of training, oldest first.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, float]
    history: list[dict[str, Any]]

    def save(self, path: str | Path) -> None:
        """Save model and tokenizer as a Hugging Face folder, checked to compute the same."""
        save_policy(Path(path), self.model, self.tokenizer)


@plain_arithmetic()
def train_sft(
    model: PreTrainedModel | Path,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Iterable[Demonstration | Mapping[str, Any]] | TokenTable,
    *,
    validation: Iterable[Demonstration | Mapping[str, Any]] | TokenTable | None = None,
    config: SftConfig | None = None,
    context: RunContext | None = None,
    allow_high_learning_rates: bool = False,
) -> SftRun:
    """Fine-tune a copy of ``model`` on demonstrations by cross-entropy on the replies.

    See algorithms.md §1.

    Args:
        model: Any causal language model, or its folder. It is left as it is.
        tokenizer: Its tokenizer. One without a chat template gets a plain one ("User: … Assistant:
            …").
        demonstrations: Records such as ``{"prompt": ..., "completion": ...}``; see
            docs/data-formats.md.
        validation: Held-out records; by default every twentieth demonstration.
        config: Settings; by default one epoch. A learning rate that is left out is one that suits
            the model.
        context: Where to report and to keep partial state; by default nowhere.
        allow_high_learning_rates: Allows a pretrained model rates that usually wreck it.

    Raises:
        ConfigError: A learning rate is far beyond what suits a pretrained model.
        DataError: A record cannot be read, or all are longer than ``config.max_tokens``.
        TrainingPaused: Three steps in a row were not finite.
    """
    require_type(config, SftConfig, "config")
    require_plain(model, "model")
    if isinstance(demonstrations, TokenTable):
        assert isinstance(validation, TokenTable) and config is not None
        train, held = demonstrations, validation
    else:
        assert not isinstance(validation, TokenTable)
        rows = held_out(Demonstration, demonstrations, validation, "demonstrations")
        config = config or default_sft_config(len(rows[0]), model)
        tokenizer = checked_tokenizer(tokenizer, model)
        train, held = (TokenTable.of_rows(tokenizer, Demonstration.KIND, part) for part in rows)
    config = with_safe_rates(config, model, allow_high_learning_rates)
    longest = fitting_length(config.max_tokens, model)
    examples, dropped = fitting_examples(train, longest)
    checks, _ = fitting_examples(held, longest)
    for name, kept, given in (("training", examples, train), ("validation", checks, held)):
        if not kept:
            raise DataError(
                f"all {len(given)} {name} demonstrations are longer than {longest} tokens; raise max_tokens"
            )
    if dropped:
        logger.warning(
            "sft: %d of %d demonstrations are longer than %d tokens and were left out",
            dropped,
            len(train),
            longest,
        )
    batches = math.ceil(len(examples) / config.batch_size)
    config = loop.within_epochs(config, batches, "sft")
    inputs = {"config": config, "demonstrations": train, "validation": held, "model": model}
    with run_context(context, "train_sft", inputs) as run:
        device = device_before(run.launch)
        own = load_policy(model, device=device)[0] if isinstance(model, Path) else own_copy(model)
        require_next_tokens(own, str(model) if isinstance(model, Path) else "model")
        say_router_loss(own, True, "sft")
        use_float32_unembedding(own)
        pad, limit = pad_id(tokenizer), run.launch.logits_bytes

        def task(engine: Engine) -> SftTask:
            return SftTask(engine, own, examples, checks, config, config.seed, pad, limit)

        trained, result = loop.train(own, task, config, "sft", config.seed, run)
    evaluations = result.evaluations()
    metrics = {
        "perplexity": evaluations[-1]["validation_perplexity"],
        "perplexity_before": evaluations[0]["validation_perplexity"],
    }
    losses = [record["loss"] for record in result.history if "loss" in record]
    if losses:
        metrics["train_loss"] = losses[-1]
    metrics |= {
        "validation_loss": evaluations[-1]["validation_loss"],
        "train_rows": float(len(examples)),
        "validation_rows": float(len(checks)),
        "dropped_over_long": float(dropped),
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": float(result.skipped_steps),
    }
    return SftRun(trained, tokenizer, metrics, result.history)


def default_sft_config(rows: int, model: PreTrainedModel | Path) -> SftConfig:
    """Return settings for one epoch over ``rows`` that are safe for a pretrained model."""
    size = min(32, rows)
    return SftConfig(
        steps=math.ceil(rows / size),
        batch_size=size,
        micro_batch_size=min(size, 8),
        max_tokens=fitting_length(2048, model),
    )

"""A DPO run from tokenised pairs to the trained policy and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.config.model import LoraConfig
from rlhf_core.config.policy import DpoConfig
from rlhf_core.models.adapters.lora import add_adapters, merge_adapters
from rlhf_core.training.dpo.logprobs import reference_logprobs
from rlhf_core.training.dpo.task import CURVE_PAIRS, DpoTask, dpo_batches, scoring_rows
from rlhf_core.training.engine.factory import build_engine, finish
from rlhf_core.training.loop import Loop, LoopSettings
from rlhf_core.training.reward.run import Split
from rlhf_core.training.rng import derive_seed
from rlhf_core.training.run_context import RunContext

NAME = "dpo"


@dataclass(frozen=True)
class DpoRun:
    """A policy trained by DPO.

    Attributes:
        model: The policy, without adapters.
        metrics: What :func:`train_dpo` says of pairs, held-out loss and accuracy, speed and cost.
        history: The records of training, oldest first.
    """

    model: PreTrainedModel
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


def train_dpo(
    model: PreTrainedModel,
    pad: int,
    train: Split,
    validation: Split,
    config: DpoConfig,
    seed: int,
    context: RunContext,
    lora: LoraConfig | None = None,
) -> DpoRun:
    """Train ``model`` in place by DPO; what it is at the start is the reference. Of several ranks only rank 0 returns.

    An interrupted run resumes from ``context.work``. The reference is in memory only before the first step: its
    log-probabilities of all pairs that will be used are computed then and kept with the partial state.
    """
    if lora is not None:
        # Before the reference is read: the policy begins with the rounding of quantised weights.
        add_adapters(model, lora, derive_seed(seed, NAME, "lora"))
    limit, rows = context.launch.logits_bytes, scoring_rows(config)
    order = dpo_batches(train.pairs, config, seed)
    used = {row for step in range(config.steps) for row in order.at(step)}
    held_out = validation.pairs[:CURVE_PAIRS]
    references = (
        reference_logprobs(model, train.pairs, used, pad, context.work / "reference_train.safetensors", rows, limit),
        reference_logprobs(
            model, held_out, range(len(held_out)), pad, context.work / "reference_validation.safetensors", rows, limit
        ),
    )
    engine = build_engine(model, config.optimizer, config.steps, NAME, context)
    task = DpoTask(engine, model, train.pairs, held_out, references, config, seed, pad, limit)
    settings = LoopSettings(NAME, seed, config.steps, config.eval_every, config.checkpoint)
    result = Loop(engine, task, settings, context).run()
    model = finish(engine, model)
    if lora is not None:
        merge_adapters(model)
    first, last = result.evaluations()[0], result.evaluations()[-1]
    metrics = {
        "steps": config.steps,
        "train_pairs": len(train.pairs),
        "train_pairs_used": len(used),
        "dropped_over_long": train.dropped["over_long"],
        "dropped_identical": train.dropped["identical"],
        "validation_loss_before": first["validation_loss"],
        **{name: value for name, value in last.items() if name.startswith("validation_")},
        "train_tokens": result.tokens,
        "train_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "skipped_steps": engine.skipped_steps,
    }
    return DpoRun(model, metrics, result.history)

"""Supervised fine-tuning: cross-entropy on the assistant's tokens (algorithms.md §1).

The token that closes a turn is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.base import PretrainingConfig, SftConfig
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.policy import RejectionSamplingConfig
from rlhf_core.data.batches import passes, whole_passes
from rlhf_core.data.schema import Demonstration
from rlhf_core.data.tokens import decode_reply, encode_prompt, left_pad, pad_id, stop_token_ids
from rlhf_core.models.causal_lm import fitting_length
from rlhf_core.models.forward import LOGITS_BYTES, position_ids_from_mask, selected_logits
from rlhf_core.runtime import distributed
from rlhf_core.training.engine.base import Engine
from rlhf_core.training.examples import (
    Example,
    LengthBucketedBatches,
    ReplyBatch,
    by_length,
    collate,
)
from rlhf_core.training.loop import StepReport
from rlhf_core.training.losses import chunked_cross_entropy
from rlhf_core.training.passes import Scalar, accumulate_gradients, device_scalar
from rlhf_core.training.rng import derive_seed

EVALUATION_ROWS = 64


def held_out_rows(config: PretrainingConfig | SftConfig | RejectionSamplingConfig) -> int:
    """Held-out examples of one pass: no more than a training pass has, where that is bounded."""
    return config.micro_batch_size or EVALUATION_ROWS


class SftTask:
    """Supervised fine-tuning on demonstrations, evaluated by perplexity on held-out ones."""

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        train: Sequence[Example],
        validation: Sequence[Example],
        config: PretrainingConfig | SftConfig | RejectionSamplingConfig,
        seed: int,
        pad: int,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.engine, self.model, self.pad = engine, model, pad
        self.train, self.validation = train, validation
        self.logits_bytes = logits_bytes
        self.micro = config.micro_batch_size or config.batch_size
        self.held_out_rows = held_out_rows(config)
        order = derive_seed(seed, "sft", "order")
        lengths = [example.length for example in train]
        self.batches = LengthBucketedBatches(lengths, config.batch_size, order)

    def train_step(self, step: int) -> StepReport:
        """Compute the gradients of one optimiser step.

        The loss is a sum over reply tokens divided by their number in all micro-batches of all
        ranks.
        """
        rows = self.batches.at(step)
        total = sum(len(self.train[row].reply) for row in rows)

        def compute(part: list[int]) -> tuple[Tensor, dict[str, Scalar]]:
            batch = example_batch([self.train[row] for row in part], self.pad, self.model.device)
            loss = reply_loss(self.model, batch, total, self.logits_bytes)
            return loss, {"loss": device_scalar(loss)}

        metrics = accumulate_gradients(self.engine, passes(rows, self.micro), compute)
        return StepReport(metrics, sum(self.train[row].length for row in rows))

    def evaluate(self, model: PreTrainedModel) -> dict[str, float]:
        """``loss`` per token and ``perplexity`` on the held-out demonstrations."""
        loss = mean_reply_loss(
            model, self.validation, self.pad, self.held_out_rows, self.logits_bytes
        )
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def example_batch(examples: Sequence[Example], pad: int, device: torch.device) -> ReplyBatch:
    """Collate examples into one padded batch on ``device``."""
    prompts = [each.prompt for each in examples]
    replies = [each.reply for each in examples]
    return collate(prompts, replies, pad).to(device)


def reply_loss(
    model: PreTrainedModel, batch: ReplyBatch, total: int, logits_bytes: int = LOGITS_BYTES
) -> Tensor:
    """Cross-entropy of a batch's reply tokens, summed and divided by ``total``.

    It is a scalar with gradient.

    Where config.json asks for it, the weighted auxiliary loss of the model's routers is added to
    what is trained on. It is a mean over the batch, so each of several batches adds its share of
    the tokens. At most ``logits_bytes`` of float32 logits exist at a time.
    """
    logits = selected_logits(
        model, batch.input_ids, batch.attention_mask, batch.select, router_loss=True
    )
    loss = chunked_cross_entropy(logits, batch.targets, total, logits_bytes)
    if logits.router_loss is None:
        return loss
    return loss + logits.router_loss * (len(batch.targets) / total)


@torch.no_grad()
def mean_reply_loss(
    model: PreTrainedModel,
    examples: Sequence[Example],
    pad: int,
    size: int = EVALUATION_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> float:
    """Mean cross-entropy in nats per reply token, in batches of ``size`` similar rows."""
    order = by_length([example.length for example in examples])
    nats = 0.0
    for part, weight in whole_passes(order, size):
        rows = [examples[row] for row in part]
        nats += weight * float(
            reply_loss(model, example_batch(rows, pad, model.device), 1, logits_bytes)
        )
    return distributed.reduce_metrics({"nats": nats})["nats"] / sum(
        len(example.reply) for example in examples
    )


@torch.no_grad()
def sample_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Demonstration],
    sampling: SamplingConfig,
    seed: int,
) -> list[dict[str, object]]:
    """Sample a reply to the prompt of each row, for people to read.

    The process's random state is left unchanged.

    What a model was published with, such as a ``min_p``, does not count.

    Returns:
        One mapping per row with ``prompt``, ``reply``, ``finished``, ``reference`` and
        ``category``; none for a row whose prompt leaves no room for a reply within the model's
        positions.
    """
    encoded = [encode_prompt(tokenizer, row.prompt) for row in rows]
    lengths = [len(prompt) + sampling.max_new_tokens for prompt in encoded]
    fitting = [
        number for number, length in enumerate(lengths) if fitting_length(length, model) == length
    ]
    if not fitting:
        return []
    rows = [rows[number] for number in fitting]
    ids, mask = left_pad([encoded[number] for number in fitting], pad_id(tokenizer))
    ids, mask = ids.to(model.device), mask.to(model.device)
    published = model.generation_config  # of which transformers would take whatever is not passed
    with torch.random.fork_rng(), ExitStack() as at_end:
        at_end.callback(setattr, model, "generation_config", published)
        model.generation_config = GenerationConfig()
        torch.manual_seed(seed)
        generated = model.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids_from_mask(mask),
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad_id(tokenizer),
            eos_token_id=list(stop_token_ids(tokenizer)),
        )
    samples: list[dict[str, object]] = []
    for row, tokens in zip(rows, generated[:, ids.shape[1] :].tolist(), strict=True):
        reply, finished = decode_reply(tokenizer, tokens)
        prompt = [{"role": m.role, "content": m.content} for m in row.prompt]
        samples.append(
            {
                "prompt": prompt,
                "reply": reply,
                "finished": finished,
                "reference": row.reply,
                "category": row.category,
            }
        )
    return samples

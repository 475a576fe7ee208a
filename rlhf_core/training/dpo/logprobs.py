"""Log-probabilities of the replies of pairs: with gradient for a batch, and of the frozen reference for all, once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.data.batches import passes
from rlhf_core.data.pairs import TokenisedPair, pair_sequences
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.lazy_logits import LOGITS_BYTES
from rlhf_core.runtime import distributed
from rlhf_core.training.dpo.loss import PairLogprobs
from rlhf_core.training.examples import ReplyBatch, by_length, collate
from rlhf_core.training.losses import chunked_token_logprobs

SCORING_ROWS = 64


def reply_logprobs(model: PreTrainedModel, batch: ReplyBatch, logits_bytes: int = LOGITS_BYTES) -> Tensor:
    """Sum of the log-probabilities of each row's reply tokens: (B,), with gradient.

    At most ``logits_bytes`` of float32 logits exist at a time.
    """
    logits = selected_logits(model, batch.input_ids, batch.attention_mask, batch.select)
    values = chunked_token_logprobs(logits, batch.targets, logits_bytes)
    by_position = values.new_zeros(batch.select.shape).masked_scatter(batch.select, values)
    return by_position.sum(dim=1)


def batch_logprobs(
    model: PreTrainedModel, pairs: Sequence[TokenisedPair], pad: int, logits_bytes: int = LOGITS_BYTES
) -> PairLogprobs:
    """Both replies of each pair in one pass of 2B rows: (B,) each, with gradient."""
    prompts = [pair.prompt for pair in pairs]
    replies = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    batch = collate([*prompts, *prompts], replies, pad).to(model.device)
    chosen, rejected = reply_logprobs(model, batch, logits_bytes).chunk(2)
    return PairLogprobs(chosen, rejected)


@torch.no_grad()
def all_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    pad: int,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> PairLogprobs:
    """Log-probabilities of all ``pairs`` in float64 (B,), in batches of ``size`` sequences of similar length.

    A sequence that several pairs share is computed once. Of several ranks each computes its share.
    """
    was_training = model.training
    model.eval()
    sequences = pair_sequences(pairs)
    values = torch.zeros(len(sequences.lengths), dtype=torch.float64)
    for rows, weight in passes(by_length(sequences.lengths), size):
        prompts, replies = zip(*(sequences.distinct[row] for row in rows), strict=True)
        computed = reply_logprobs(model, collate(prompts, replies, pad).to(model.device), logits_bytes)
        if weight:
            values[rows] = computed.double().cpu()
    model.train(was_training)
    values = distributed.all_reduce_sum(values)
    return PairLogprobs(values[sequences.chosen], values[sequences.rejected])


def reference_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[TokenisedPair],
    used: Collection[int],
    pad: int,
    file: Path,
    size: int = SCORING_ROWS,
    logits_bytes: int = LOGITS_BYTES,
) -> PairLogprobs:
    """Log-probabilities under the reference, which never changes: computed once, and read from ``file`` on a resume.

    Args:
        model: The reference: the policy before its first step.
        pairs: All pairs.
        used: Numbers of those that training will read; the others are NaN.
        pad: Id of the padding token.
        file: Where the values are kept; it belongs to the partial state of one run.
        size: Sequences of one pass.
        logits_bytes: Bytes of float32 logits that may exist at a time.
    """
    if file.is_file():
        stored = load_file(file)
        return PairLogprobs(stored["chosen"], stored["rejected"])
    rows = sorted(used)
    computed = all_logprobs(model, [pairs[row] for row in rows], pad, size, logits_bytes)
    logprobs = PairLogprobs(*(torch.full((len(pairs),), torch.nan, dtype=torch.float64) for _ in range(2)))
    logprobs.chosen[rows], logprobs.rejected[rows] = computed.chosen, computed.rejected
    if distributed.is_rank_zero():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({"chosen": logprobs.chosen, "rejected": logprobs.rejected}, part)
        part.replace(file)
    return logprobs

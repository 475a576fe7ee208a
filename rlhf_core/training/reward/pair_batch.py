"""The sequences of preference pairs as they pass a scalar model, in micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.config.reward import PairBatchConfig
from rlhf_core.data.pairs import PrefixRow, TokenisedPair, pair_sequences, rows_of_sequences
from rlhf_core.models.heads.scalar import ScalarModel
from rlhf_core.models.prefix_sharing import PrefixBatch, prefix_batch
from rlhf_core.training.examples import ReplyBatch, collate


@dataclass(frozen=True)
class PairMicroBatch:
    """Sequences that pass the model together.

    Attributes:
        sequences: Each of them in a row of its own, right-padded.
        prefixes: With prefix sharing the rows that are computed in their place.
    """

    sequences: ReplyBatch
    prefixes: PrefixBatch | None

    def hidden(self, model: ScalarModel) -> Tensor:
        """Last hidden states of each sequence (rows of ``sequences``, L, H)."""
        if self.prefixes is None:
            return model.hidden(self.sequences.input_ids, self.sequences.attention_mask)
        return self.prefixes.hidden(model.model.base_model)


@dataclass(frozen=True)
class PairBatch:
    """The sequences of B pairs in micro-batches, and where each pair has its own.

    Attributes:
        micro_batches: They follow each other in the numbers below.
        chosen: Row of each pair's chosen sequence among those of all micro-batches (B,).
        rejected: Row of each pair's rejected sequence (B,).
    """

    micro_batches: list[PairMicroBatch]
    chosen: Tensor
    rejected: Tensor


def row_lengths(pairs: Sequence[TokenisedPair], config: PairBatchConfig) -> list[int]:
    """Tokens of each row that is computed of ``pairs``: of a sequence, or of a prompt with its replies."""
    return [row.length for row in rows_of_sequences(pair_sequences(pairs, config.group_prompts), config.prefix_sharing)]


def pair_batch(
    pairs: Sequence[TokenisedPair],
    pad: int,
    device: torch.device,
    config: PairBatchConfig,
    micro_batches: Sequence[Sequence[int]] | None = None,
) -> PairBatch:
    """Collate pairs on ``device``; with ``group_prompts`` a sequence that several have is computed once.

    Args:
        micro_batches: Numbers of the rows of :func:`row_lengths` that are padded together; None for one micro-batch.
    """
    sequences = pair_sequences(pairs, config.group_prompts)
    rows = rows_of_sequences(sequences, config.prefix_sharing)
    parts = [[rows[number] for number in part] for part in micro_batches or [range(len(rows))]]
    in_order = [number for part in parts for row in part for number in row.numbers]
    row_of = {number: row for row, number in enumerate(in_order)}
    return PairBatch(
        [_micro_batch(part, pad, device, config.prefix_sharing) for part in parts],
        torch.tensor([row_of[number] for number in sequences.chosen], device=device),
        torch.tensor([row_of[number] for number in sequences.rejected], device=device),
    )


def _micro_batch(rows: Sequence[PrefixRow], pad: int, device: torch.device, prefix_sharing: bool) -> PairMicroBatch:
    prompts, replies = zip(*((row.prompt, reply) for row in rows for reply in row.replies), strict=True)
    prefixes = prefix_batch(rows, pad).to(device) if prefix_sharing else None
    return PairMicroBatch(collate(prompts, replies, pad).to(device), prefixes)

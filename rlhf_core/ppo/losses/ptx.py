"""PPO-ptx: cross-entropy on pretraining or demonstration texts in every policy update (Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from rlhf_core.data.batches.batching import batch_at
from rlhf_core.data.batches.category_shares import rows_by_category_share
from rlhf_core.data.batches.sharding import passes
from rlhf_core.data.chat.encoding import right_pad
from rlhf_core.data.tokens.token_table import TokenTable
from rlhf_core.errors import DataError
from rlhf_core.models.forward import selected_logits
from rlhf_core.models.lazy_logits import LOGITS_BYTES
from rlhf_core.runtime import distributed
from rlhf_core.training.engine import Engine
from rlhf_core.training.losses import chunked_cross_entropy


class PtxTexts(Sequence[tuple[list[int], list[int]]]):
    """Texts as ``(context ids, target ids)``, made of a table of token ids each time they are asked for.

    Args:
        table: Demonstrations, of which the replies are to be predicted, or plain texts, which have no context.
        rows: Row numbers of the texts, in their order.
    """

    def __init__(self, table: TokenTable, rows: npt.NDArray[np.int64]) -> None:
        self.table, self.rows = table, rows
        *before, self.targets = (table.column(name) for name in table.id_columns)
        self.contexts = before[0] if before else None

    @classmethod
    def of_table(cls, table: TokenTable, longest: int | None = None) -> PtxTexts:
        """Those rows of demonstrations or of plain texts that have at most ``longest`` tokens."""
        if longest is None:
            return cls(table, np.arange(len(table)))
        lengths = np.sum([table.column(name).lengths for name in table.id_columns], axis=0)
        return cls(table, np.flatnonzero(lengths <= longest))

    def with_category_shares(self, shares: Mapping[str, float], seed: int, parameter: str) -> PtxTexts:
        """Repeat and draw texts until categories have their shares; see :func:`rows_by_category_share`."""
        if not shares:
            return self
        mixed = rows_by_category_share(self.table.categories(), shares, seed, 0, parameter, self.rows.tolist())
        return PtxTexts(self.table, np.array(mixed))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> tuple[list[int], list[int]]: ...

    @overload
    def __getitem__(self, number: slice) -> PtxTexts: ...

    def __getitem__(self, number: int | slice) -> tuple[list[int], list[int]] | PtxTexts:
        if isinstance(number, slice):
            return PtxTexts(self.table, self.rows[number])
        row = int(self.rows[number])
        return list(self.contexts[row]) if self.contexts is not None else [], list(self.targets[row])


class Texts(Protocol):
    """Texts by number, each as ``(context ids, target ids)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class PtxData:
    """Sequences as ``(context ids, target ids)``; only the targets count. Plain text has an empty context."""

    sequences: Texts
    batch_size: int
    seed: int
    pad_id: int

    def __post_init__(self) -> None:
        texts = (self.sequences[number] for number in range(len(self.sequences)))
        if not any(context or len(target) > 1 for context, target in texts):
            raise DataError("there is no text for the ptx loss; set ppo.ptx.weight to 0 or ppo.ptx.data to another set")

    def batch(self, step: int) -> list[tuple[list[int], list[int]]]:
        """The texts of optimiser step ``step``, a function of (seed, step) alone."""
        rows = batch_at(len(self.sequences), self.batch_size, self.seed, step)
        return [self.sequences[row] for row in rows]


def accumulate_ptx_gradient(
    engine: Engine,
    model: PreTrainedModel,
    data: PtxData,
    step: int,
    weight: float,
    micro_batch_size: int | None,
    logits_bytes: int = LOGITS_BYTES,
) -> float:
    """Backward pass of ``weight * CE`` on one batch; returns CE in nats per target token of the batch."""
    batch = sorted(data.batch(step), key=lambda pair: len(pair[0]) + len(pair[1]))
    # The first token of a plain text has nothing before it to be predicted from.
    total = sum(len(target) - (not context) for context, target in batch)
    losses: list[torch.Tensor] = []
    size = micro_batch_size or len(batch)
    for rows, counts in passes(list(range(len(batch))), size):
        pairs = [batch[row] for row in rows]
        loss_of_part = engine.forward(partial(ptx_loss_sum, model, pairs, data.pad_id, logits_bytes))
        loss = counts * loss_of_part / max(total, 1)
        engine.backward(weight * loss)
        losses.append(loss.detach())
    return distributed.reduce_metrics({"loss": sum(torch.stack(losses).tolist())})["loss"]


def ptx_loss_sum(
    model: PreTrainedModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    pad_id: int,
    logits_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """Summed cross-entropy of the target tokens, a scalar. No sampling temperature: this is language modelling."""
    ids, mask = right_pad([context + target for context, target in pairs], pad_id)
    ids, mask = ids.to(model.device), mask.to(model.device)
    contexts = torch.tensor([len(context) for context, _ in pairs], device=ids.device).unsqueeze(1)
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    counted = (mask.bool() & (positions >= contexts))[:, 1:]
    select = torch.nn.functional.pad(counted, (0, 1))
    return chunked_cross_entropy(selected_logits(model, ids, mask, select), ids[:, 1:][counted], 1, logits_bytes)

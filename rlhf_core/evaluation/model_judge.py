"""Learned judges (reward model, referee) behind the protocol that every judge follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rlhf_core import distributed
from rlhf_core.data.chat import encode_prompt, encode_reply, pad_id, right_pad
from rlhf_core.data.schema import Message
from rlhf_core.data.sharding import passes
from rlhf_core.evaluation.text_metrics import Reply
from rlhf_core.models.base import load_tokenizer
from rlhf_core.models.heads import ScalarModel


class LastTokenModel(Protocol):
    """A reward model or referee, whole or sharded."""

    def last_token_scores(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, L) twice -> scalar at each row's last real token (B,)."""


class Scale(Protocol):
    """What a judge's scores mean. ``absolute_tie`` is a tie margin in the judge's own unit where it has one, None for
    judges whose unit means nothing (their margin is relative to the spread of scores)."""

    name: str
    absolute_tie: float | None


@dataclass
class ScaleOf:
    """The scale of a judge that is no longer there."""

    name: str
    absolute_tie: float | None


class Judge(Scale, Protocol):
    """Scores replies; higher is better."""

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """One score per (prompt, reply)."""
        ...


class ModelJudge:
    """A scalar model read at the last token: the ending of a finished reply, the last word of an unfinished one."""

    absolute_tie: float | None = None

    def __init__(self, folder: Path, name: str, batch_size: int = 64, model: LastTokenModel | None = None) -> None:
        """``model`` is the one of ``folder`` where it is there already: a second copy of a large one may not fit."""
        self.name, self.batch_size = name, batch_size
        self.tokenizer = load_tokenizer(folder)
        self.model: LastTokenModel = model if model is not None else ScalarModel.load(folder).eval()

    def score(self, prompts: Sequence[Sequence[Message]], replies: Sequence[Reply]) -> list[float]:
        """Scores in the model's own unit. Batches are of similar length; padding never changes a score.
        Ranks share the work."""
        sequences = [self._encode(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        scores = [0.0] * len(sequences)
        for rows, weight in passes(order, self.batch_size):
            ids, mask = right_pad([sequences[i] for i in rows], pad_id(self.tokenizer))
            device = distributed.device()
            with torch.inference_mode():
                values = self.model.last_token_scores(ids.to(device), mask.to(device)).float().tolist()
            for row, value in zip(rows, values, strict=True) if weight else ():
                scores[row] = value
        # Each rank has scored its share and left zeros at the others'.
        together: list[float] = distributed.all_reduce_sum(torch.tensor(scores, dtype=torch.float64)).tolist()
        return together

    def _encode(self, prompt: Sequence[Message], reply: Reply) -> list[int]:
        tokens = encode_reply(self.tokenizer, reply.text)
        if not reply.finished and len(tokens) > 1:
            tokens = tokens[:-1]
        return [*encode_prompt(self.tokenizer, prompt), *tokens]

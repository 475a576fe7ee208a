"""The protocol of reward sources, and what they are given: a rollout's replies as tokens and, if asked for, as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import decode_reply
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.sampling.token_scoring import Tokens

LARGEST = torch.finfo(torch.float32).max


class PromptReader:
    """Finds the messages that prompt tokens were made from. Prompts of equal tokens are one to the policy, and here."""

    def __init__(self, prompts: Sequence[Sequence[Message]], prompt_ids: Sequence[Sequence[int]]) -> None:
        self.prompts, self.prompt_ids = prompts, prompt_ids

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        """The first row of each prompt. Digests, because a copy of all tokens would weigh as much as they do."""
        return {_digest(ids): row for row, ids in reversed(list(enumerate(self.prompt_ids)))}

    def messages(self, batch: Tokens) -> list[Sequence[Message]]:
        """The prompt of each row of ``batch``; ``RlhfError`` for tokens that are not those of a known prompt."""
        width = batch.tokens.shape[1] - batch.width
        rows = zip(batch.tokens[:, :width].tolist(), batch.attention_mask[:, :width].tolist(), strict=True)
        found = [self._rows.get(_digest([i for i, kept in zip(*row, strict=True) if kept])) for row in rows]
        if None in found:
            raise RlhfError(f"row {found.index(None)} of the rollout does not begin with any of the prompts")
        return [self.prompts[row] for row in found if row is not None]


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Replies:
    """B replies to score. Text is made when a source first asks for it: reward models read the tokens themselves."""

    tokens: Tokens
    reader: PromptReader
    tokenizer: PreTrainedTokenizerBase

    def __len__(self) -> int:
        return len(self.tokens.tokens)

    def part(self, rows: Sequence[int]) -> Replies:
        """The given rows."""
        return Replies(self.tokens.part(torch.tensor(rows)), self.reader, self.tokenizer)

    @cached_property
    def prompts(self) -> list[Sequence[Message]]:
        """The messages that each reply answers."""
        return self.reader.messages(self.tokens)

    @cached_property
    def _decoded(self) -> list[tuple[str, bool]]:
        lengths = self.tokens.response_mask.sum(dim=1).tolist()
        rows = zip(self.tokens.response.tolist(), lengths, strict=True)
        return [decode_reply(self.tokenizer, row[:length]) for row, length in rows]

    @property
    def texts(self) -> list[str]:
        """Each reply without its end marker."""
        return [text for text, _ in self._decoded]

    @property
    def finished(self) -> list[bool]:
        """Whether each reply ends with its end marker."""
        return [finished for _, finished in self._decoded]


class Source(Protocol):
    """Scores replies; higher is better. ``figures`` tell more of the newest batch, beyond its mean and spread."""

    figures: dict[str, float]

    def score(self, replies: Replies) -> Tensor:
        """One raw score per reply (B,), float32 on the device of the tokens."""


def checked_scores(values: Any, replies: Replies, who: str) -> Tensor:
    """What something outside this project gave as scores: (B,) float32 on the device of the tokens.

    ``DataError`` when it is not one finite number per reply: a guess in place of a reward would be trained on.
    """
    listed = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
    if not isinstance(listed, list | tuple):
        raise DataError(f"{who} gave {type(values).__name__} for scores; a list with one number per reply is needed")
    if len(listed) != len(replies):
        raise DataError(
            f"{who} gave {len(listed)} scores for {len(replies)} replies; one per reply is needed, in order"
        )
    for position, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise DataError(f"{who}: score {position} is {_shown(value)}, which is not a number")
        if not abs(cast(float, value)) <= LARGEST:
            raise DataError(f"{who}: score {position} is {_shown(value)}; scores must be finite in single precision")
    return torch.tensor([float(value) for value in listed], dtype=torch.float32, device=replies.tokens.tokens.device)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

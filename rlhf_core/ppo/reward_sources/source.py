"""The protocol of reward sources, and their input: a rollout's replies as tokens and, on demand, as text."""

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

from rlhf_core.data.chat.encoding import decode_reply
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.ppo.rollouts.prompts import TrainingPrompts
from rlhf_core.sampling.token_scoring import Tokens

LARGEST = torch.finfo(torch.float32).max


class PromptReader:
    """Finds the messages that prompt tokens were made from; prompts of equal tokens count as one."""

    def __init__(self, prompts: TrainingPrompts) -> None:
        self.prompts = prompts

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        """The first row of each prompt, by digests: a second copy of all tokens would double their memory."""
        return {_digest(ids): row for row, ids in reversed(list(enumerate(self.prompts.ids)))}

    def messages(self, batch: Tokens) -> list[Sequence[Message]]:
        """The prompt of each row of ``batch``.

        Raises:
            RlhfError: A row's tokens are not those of a known prompt.
        """
        width = batch.tokens.shape[1] - batch.width
        rows = zip(batch.tokens[:, :width].tolist(), batch.attention_mask[:, :width].tolist(), strict=True)
        known = [self._rows.get(_digest([i for i, kept in zip(*row, strict=True) if kept])) for row in rows]
        if None in known:
            raise RlhfError(f"row {known.index(None)} of the rollout does not begin with any of the prompts")
        return [self.prompts.messages[row] for row in known if row is not None]


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Replies:
    """B replies. They are decoded when a source first asks for text: reward models read the tokens themselves."""

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
    """Rewards replies; higher is better. ``metrics`` describe the newest batch beyond its mean and spread."""

    metrics: dict[str, float]

    def rewards(self, replies: Replies) -> Tensor:
        """One raw reward per reply (B,), float32 on the device of the tokens."""


def checked_rewards(values: Any, replies: Replies, who: str) -> Tensor:
    """Check scores from outside this project, and make rewards of them: (B,) float32 on the device of the tokens.

    Args:
        values: The scores, which may be anything.
        replies: The replies that they are of.
        who: What gave them, for messages.

    Raises:
        DataError: They are not one finite number per reply. A guess in place of a reward would be trained on.
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
            raise DataError(f"{who}: score {position} is {_shortened(value)}, which is not a number")
        if not abs(cast(float, value)) <= LARGEST:
            raise DataError(
                f"{who}: score {position} is {_shortened(value)}; scores must be finite in single precision"
            )
    return torch.tensor([float(value) for value in listed], dtype=torch.float32, device=replies.tokens.tokens.device)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""How long texts are: percentiles of characters and of tokens, and how many rows exceed a limit of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.data.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERCENTILES = (50, 90, 99, 100)
REPLIES = {"preferences": ("chosen", "rejected"), "demonstrations": ("reply",)}
TOKENISED_ROWS = 2000


@dataclass(frozen=True)
class LengthPercentiles:
    """The 50th, 90th, 99th and 100th percentile of the lengths of ``name``; each is the length of some text."""

    name: str
    values: tuple[int, ...]

    @classmethod
    def of(cls, name: str, lengths: Sequence[int]) -> LengthPercentiles:
        """Take the percentiles of ``lengths``, of which there must be one at least."""
        return cls(name, tuple(int(v) for v in np.percentile(lengths, PERCENTILES, method="inverted_cdf")))


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of the sequences that training sees: a prompt with its longest reply.

    Attributes:
        rows: How many rows were tokenised.
        over_limit: How many of them exceed ``limit`` and would be dropped.
    """

    percentiles: LengthPercentiles
    rows: int
    limit: int
    over_limit: int


def character_lengths(kind: str, rows: Sequence[Mapping[str, Any]]) -> list[LengthPercentiles]:
    """Return percentiles of the characters of each text column of ``kind``; the turns of a prompt count together."""
    if not rows:
        return []
    if kind == "pretrain":
        return [LengthPercentiles.of("text", [len(row["text"]) for row in rows])]
    prompts = [sum(len(turn["content"]) for turn in row["prompt"]) for row in rows]
    replies = [LengthPercentiles.of(name, [len(row[name]) for row in rows]) for name in REPLIES.get(kind, ())]
    return [LengthPercentiles.of("prompt", prompts), *replies]


def token_lengths(
    tokenizer: PreTrainedTokenizerBase, kind: str, rows: Sequence[Mapping[str, Any]], limit: int
) -> TokenLengths:
    """Tokenise up to 2,000 ``rows`` of preferences or demonstrations, spread evenly over the file, as training does."""
    from rlhf_core.data.chat import encode_prompt, encode_reply  # imports torch, which characters do not need

    sample = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), TOKENISED_ROWS)).astype(int))]
    lengths = []
    for row in sample:
        prompt = encode_prompt(tokenizer, [Message(turn["role"], turn["content"]) for turn in row["prompt"]])
        lengths.append(len(prompt) + max(len(encode_reply(tokenizer, row[name])) for name in REPLIES[kind]))
    percentiles = LengthPercentiles.of("prompt + reply", lengths)
    return TokenLengths(percentiles, len(sample), limit, sum(length > limit for length in lengths))

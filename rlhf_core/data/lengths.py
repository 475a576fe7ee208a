"""Lengths of texts in tokens: percentiles of a sample of rows that is spread evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlhf_core.data.schema import Message
from rlhf_core.errors import UnwritableText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PERCENTILES = (50, 90, 99, 100)
REPLIES = {"preferences": ("chosen", "rejected"), "demonstrations": ("reply",)}
SEQUENCE = "prompt + reply"


@dataclass(frozen=True)
class LengthPercentiles:
    """The 50th, 90th, 99th and 100th percentile of the lengths of ``name``; each is the length of some text."""

    name: str
    values: tuple[int, ...]

    @classmethod
    def of(cls, name: str, lengths: Sequence[int]) -> LengthPercentiles:
        """Take the percentiles of ``lengths``; there are none of no lengths."""
        if not lengths:
            return cls(name, ())
        return cls(name, tuple(int(v) for v in np.percentile(lengths, PERCENTILES, method="inverted_cdf")))


@dataclass
class UnwritableRows:
    """Rows that the tokenizer cannot write for one reason: how many, and the position of the first in the file."""

    reason: str
    first: int
    rows: int = 0


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of the sequences that training sees: a prompt with its longest reply.

    Attributes:
        percentiles: Of the rows that can be written.
        rows: How many rows were looked at.
        over_limit: How many of them exceed ``limit`` and would be dropped.
        unwritable: Those that the tokenizer cannot write, by reason.
        marked: How many of the others have a reply with a marker, such as that of reasoning, by which the chat template
            writes it otherwise; training writes it as the template does.
    """

    percentiles: LengthPercentiles
    rows: int
    limit: int
    over_limit: int
    unwritable: Sequence[UnwritableRows] = ()
    marked: int = 0


def character_counts(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the characters of each text column of ``rows`` of ``kind``; the turns of a prompt count together."""
    if kind == "pretrain":
        return {"text": [len(row["text"]) for row in rows]}
    prompts = [sum(len(turn["content"]) for turn in row["prompt"]) for row in rows]
    return {"prompt": prompts} | {name: [len(row[name]) for row in rows] for name in REPLIES.get(kind, ())}


def token_counts(tokenizer: PreTrainedTokenizerBase, kind: str, row: Mapping[str, Any]) -> dict[str, int]:
    """Count the tokens of each text column of a row as training writes it, and of the sequence that training sees.

    A prompt is written by the chat template up to where the reply begins, a reply with the token that ends it, a text
    of pretraining with the end-of-sequence token. The sequence is a prompt with its longest reply.

    Raises:
        UnwritableText: The template refuses the dialogue, or the tokenizer cannot write a special token as plain text.
    """
    from rlhf_core.data.encoding import encode_prompt, encode_reply, encode_text  # imports torch

    if kind == "pretrain":
        return {"text": len(encode_text(tokenizer, row["text"]))}
    turns = [Message(turn["role"], turn["content"]) for turn in row["prompt"]]
    prompt = {"prompt": len(encode_prompt(tokenizer, turns))}
    replies = {name: len(encode_reply(tokenizer, row[name])) for name in REPLIES.get(kind, ())}
    return prompt | replies | ({SEQUENCE: prompt["prompt"] + max(replies.values())} if replies else {})


def evenly_spread(total: int, count: int) -> npt.NDArray[np.int64]:
    """Return up to ``count`` of the numbers below ``total``, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, total - 1, min(total, count)).astype(np.int64))


def token_lengths(
    tokenizer: PreTrainedTokenizerBase, kind: str, rows: Sequence[Mapping[str, Any]], limit: int
) -> TokenLengths:
    """Tokenise ``rows`` of preferences or demonstrations, each with its ``position``, as training does."""
    from rlhf_core.data.chat_template import reply_format  # imports torch

    lengths: list[int] = []
    marked = 0
    unwritable: dict[str, UnwritableRows] = {}
    for row in rows:
        try:
            lengths.append(token_counts(tokenizer, kind, row)[SEQUENCE])
            marked += any(reply_format(tokenizer).is_marked(row[name]) for name in REPLIES[kind])
        except UnwritableText as error:
            unwritable.setdefault(error.reason, UnwritableRows(error.reason, row["position"])).rows += 1
    over_limit = sum(length > limit for length in lengths)
    percentiles = LengthPercentiles.of(SEQUENCE, lengths)
    return TokenLengths(percentiles, len(rows), limit, over_limit, list(unwritable.values()), marked)

"""A reply as metrics and judges see it, and what a set of replies looks like without any judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Message
from rlhf_core.data.text import mean, reply_statistics, split_words
from rlhf_core.errors import DataError


@dataclass(frozen=True)
class Reply:
    """A reply to one prompt, as the policy wrote it.

    Attributes:
        text: The reply without its end marker. Special tokens inside it are visible, such as ``<|user|>``.
        finished: Whether the reply ended by itself.
        token_ids: The generated ids, end marker included; empty for a reply that is known as text only.
        special_tokens: How many of ``token_ids`` are padding, role or other special tokens: defects of the reply.
        vocabulary: The vocabulary that ``token_ids`` belong to; see
            :func:`~rlhf_core.data.encoding.vocabulary_id`.
    """

    text: str
    finished: bool
    token_ids: tuple[int, ...] = ()
    special_tokens: int = 0
    vocabulary: str = ""


def rows_of_file(file: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield each row of a file of records with its place for messages, its position, and its fields.

    Raises:
        DataError: The file cannot be read, or a row has no fields.
    """
    for record in stream_records(file):
        where = f"{file}, line {record.position}"
        if record.problem or not isinstance(record.value, dict):
            raise DataError(f"{where}: {record.problem or 'no object with fields'}")
        yield where, record.position, record.value


def prompt_of(value: Any) -> list[Message] | None:
    """Return a prompt that a file gives as a text or as a list of messages; None for anything else."""
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        return None
    known = [
        Message(turn["role"], turn["content"])
        for turn in turns
        if isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
    ]
    return known if len(known) == len(turns) else None


def measure_text(replies: Sequence[Reply]) -> dict[str, float]:
    """Return statistics of a set of replies, all 0 for none; docs/metrics.md gives healthy ranges.

    Returns:
        Those of :func:`~rlhf_core.data.text.reply_statistics`; ``words``, mean number of words and punctuation marks;
        ``special_tokens``, share of replies with padding, role or other special tokens inside.
    """
    texts = [reply.text for reply in replies]
    lengths = [len(reply.token_ids) for reply in replies]
    return reply_statistics(texts, lengths, [reply.finished for reply in replies]) | {
        "words": mean([len(split_words(text)) for text in texts]),
        "special_tokens": mean([reply.special_tokens > 0 for reply in replies]),
    }

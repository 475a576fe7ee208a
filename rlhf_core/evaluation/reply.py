"""A reply as metrics and judges see it, and what a set of replies looks like without any judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.data import text as text_statistics
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.schema import ROLES, Message
from rlhf_core.errors import DataError

SHORT_TOKENS = 4  # a reply of fewer tokens, its end marker included, says at most two words


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
        ``length``, mean number of tokens, end marker included; ``words``, mean number of words and punctuation marks;
        ``repetition``, mean share of a reply's trigrams that occurred before in it; ``distinct_2``, different bigrams
        over all bigrams of the set; shares of replies: ``missing_eos`` without end marker, ``special_tokens`` with
        padding, role or other special tokens inside, ``short_replies`` of fewer than ``SHORT_TOKENS`` tokens;
        ``distinct_first_sentences`` over replies, and the share of the ``commonest_first_sentence``.
    """
    texts = [reply.text for reply in replies]
    lengths = [len(reply.token_ids) for reply in replies]
    return {
        "length": sum(lengths) / len(lengths) if lengths else 0.0,
        "words": text_statistics.mean_words(texts),
        "repetition": text_statistics.mean_repetition(texts),
        "distinct_2": text_statistics.distinct_n(texts, 2),
        "missing_eos": text_statistics.missing_eos_rate([reply.finished for reply in replies]),
        "special_tokens": sum(reply.special_tokens > 0 for reply in replies) / len(replies) if replies else 0.0,
        "short_replies": text_statistics.short_reply_rate(lengths, SHORT_TOKENS),
        "distinct_first_sentences": text_statistics.distinct_first_sentences(texts),
        "commonest_first_sentence": text_statistics.commonest_first_sentence(texts)[1],
    }

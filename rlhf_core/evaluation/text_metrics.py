"""What a set of replies looks like, without any judge: the figures under ``sft`` and ``policy`` in the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.data import text_statistics

SHORT_TOKENS = 4  # a reply with fewer tokens, its ending included, says at most two words


@dataclass(frozen=True)
class Reply:
    """A reply's text, whether it ended by itself, and its length in tokens (the ending included)."""

    text: str
    finished: bool
    tokens: int = 0


def describe(replies: Sequence[Reply]) -> dict[str, float]:
    """Length (tokens), words, repetition, distinct_2, missing_eos, short_replies, distinct_first_sentences and
    commonest_first_sentence (shares), each a mean over the replies. See docs/metrics.md for healthy ranges."""
    texts = [reply.text for reply in replies]
    lengths = [reply.tokens for reply in replies]
    return {
        "length": sum(lengths) / len(lengths) if lengths else 0.0,
        "words": text_statistics.mean_words(texts),
        "repetition": text_statistics.mean_repetition(texts),
        "distinct_2": text_statistics.distinct_n(texts, 2),
        "missing_eos": text_statistics.missing_eos_rate([reply.finished for reply in replies]),
        "short_replies": text_statistics.short_reply_rate(lengths, SHORT_TOKENS),
        "distinct_first_sentences": text_statistics.distinct_first_sentences(texts),
        "commonest_first_sentence": text_statistics.commonest_first_sentence(texts)[1],
    }

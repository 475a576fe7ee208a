"""A reply as metrics and judges see it, and what a set of replies looks like without any judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rlhf_core.data import text as text_statistics

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


@dataclass(frozen=True)
class TextMetrics:
    """Statistics of a set of replies; docs/metrics.md gives healthy ranges.

    Attributes:
        length: Mean number of tokens, end marker included.
        words: Mean number of words and punctuation marks.
        repetition: Mean share of a reply's trigrams that occurred before in it.
        distinct_2: Different bigrams over all bigrams of the set.
        missing_eos: Share of replies without end marker.
        special_tokens: Share of replies with padding, role or other special tokens inside.
        short_replies: Share of replies of fewer than ``SHORT_TOKENS`` tokens.
        distinct_first_sentences: Different first sentences over replies.
        commonest_first_sentence: Share of the most frequent first sentence.
    """

    length: float
    words: float
    repetition: float
    distinct_2: float
    missing_eos: float
    special_tokens: float
    short_replies: float
    distinct_first_sentences: float
    commonest_first_sentence: float

    def as_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return asdict(self)


def measure_text(replies: Sequence[Reply]) -> TextMetrics:
    """Compute the :class:`TextMetrics` of ``replies``; all are 0 for no replies."""
    texts = [reply.text for reply in replies]
    lengths = [len(reply.token_ids) for reply in replies]
    return TextMetrics(
        length=sum(lengths) / len(lengths) if lengths else 0.0,
        words=text_statistics.mean_words(texts),
        repetition=text_statistics.mean_repetition(texts),
        distinct_2=text_statistics.distinct_n(texts, 2),
        missing_eos=text_statistics.missing_eos_rate([reply.finished for reply in replies]),
        special_tokens=sum(reply.special_tokens > 0 for reply in replies) / len(replies) if replies else 0.0,
        short_replies=text_statistics.short_reply_rate(lengths, SHORT_TOKENS),
        distinct_first_sentences=text_statistics.distinct_first_sentences(texts),
        commonest_first_sentence=text_statistics.commonest_first_sentence(texts)[1],
    )

"""Statistics of replies as text: the signals that separate a healthy policy from a collapsed one (algorithms.md §8).

All functions are pure. A *word* is a run of letters or digits, a punctuation mark, or a single
ideograph, so that languages written without spaces are measured too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rlhf_core.data.text.refusals import is_refusal

# Ideographs and kana, which no space separates: for a regular expression's character class.
IDEOGRAPHS = r"\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W_{IDEOGRAPHS}]+|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|(?<=[。！？])|\n")  # fmt: skip


def split_words(text: str) -> list[str]:
    """Return the casefolded words of ``text``, in order."""
    return _WORD.findall(text.casefold())


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of ``n`` neighbours; none when there are fewer than ``n`` items."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def trigram_repetition(text: str) -> float:
    """Return the share of a reply's trigrams that occurred before in it: 0 for none, towards 1 for a loop.

    ``a b a b a`` has the trigrams aba, bab, aba: one of three is a repeat. Replies below three words give 0.
    """
    grams = ngrams(split_words(text), 3)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def mean_repetition(replies: Sequence[str]) -> float:
    """Return the mean of :func:`trigram_repetition` over replies; 0 for no replies."""
    return _mean([trigram_repetition(reply) for reply in replies])


def distinct_n(replies: Sequence[str], n: int = 2) -> float:
    """Return different n-grams over all n-grams of a set of replies (Li et al. 2016); 0 when no reply has ``n`` words.

    It falls with the size of the set, so compare sets of equal size only.
    """
    counts = Counter(gram for reply in replies for gram in ngrams(split_words(reply), n))
    total = counts.total()
    return len(counts) / total if total else 0.0


def first_sentence(text: str) -> str:
    """Return the text up to its first sentence end or line break, casefolded, with single spaces."""
    head = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    return " ".join(head.casefold().split())


def distinct_first_sentences(replies: Sequence[str]) -> float:
    """Return different first sentences over replies: 1 when all begin differently, 1/n when all begin alike."""
    return len({first_sentence(reply) for reply in replies}) / len(replies) if replies else 0.0


def commonest_first_sentence(replies: Sequence[str]) -> tuple[str, float]:
    """Return the most frequent first sentence and its share; one refusal for every prompt gives nearly 1."""
    if not replies:
        return "", 0.0
    sentence, count = Counter(first_sentence(reply) for reply in replies).most_common(1)[0]
    return sentence, count / len(replies)


def commonest_reply(replies: Sequence[str]) -> float:
    """Return the share of the most frequent whole reply, ignoring case and spacing."""
    same = Counter(" ".join(reply.casefold().split()) for reply in replies)
    return same.most_common(1)[0][1] / len(replies) if replies else 0.0


def refusal_rate(replies: Sequence[str]) -> float:
    """Return the share of replies that ``data.refusals.is_refusal`` recognises."""
    return _mean([float(is_refusal(reply)) for reply in replies])


def short_reply_rate(lengths: Sequence[int], below: int = 4) -> float:
    """Return the share of replies shorter than ``below``, in the unit of ``lengths``."""
    return _mean([float(length < below) for length in lengths])


def missing_eos_rate(finished: Sequence[bool]) -> float:
    """Return the share of replies cut off by the token limit instead of ending by themselves."""
    return _mean([float(not done) for done in finished])


def mean_words(replies: Sequence[str]) -> float:
    """Return the mean number of words, punctuation included."""
    return _mean([float(len(split_words(reply))) for reply in replies])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

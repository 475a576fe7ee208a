"""What is seen and counted in texts: characters, language tags, refusals, statistics, keys.

Statistics of replies are the signals that separate a healthy policy from a collapsed one
(algorithms.md §8).

All functions are pure. A *word* is a run of letters or digits, a punctuation mark, or a single
ideograph, so that languages written without spaces are measured too.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache

from rlhf_core.redaction import SECRETS, redacted

HALF_PAIR = "holds half of a surrogate pair, which is no valid Unicode"


def is_encodable(text: str) -> bool:
    """Return whether ``text`` can be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_KANA = re.compile(r"[\u3040-\u30ff]")
_HAN = re.compile(r"[\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_HANGUL = re.compile(r"[\uac00-\ud7a3]")
_LETTER = re.compile(r"[^\W\d_]")
# An ideograph stands for about three letters of an alphabet, so that a Chinese text may quote
# English or code.
MIN_SHARE = 0.25


def writable(text: str) -> str:
    """Return a text that files can hold: JSON's halves of surrogate pairs become question marks."""
    return text.encode("utf-8", "replace").decode()


def language_tag(text: str) -> str:
    """Return the language tag (BCP 47) of a Chinese, Japanese or Korean text, and "" for any other.

    These share ideographs, but not their shapes. Alphabets say less: English and Indonesian look
    the same.
    """
    letter_count = len(_LETTER.findall(text))
    kana, han, hangul = (len(script.findall(text)) for script in (_KANA, _HAN, _HANGUL))
    if not letter_count or kana + han + hangul < MIN_SHARE * letter_count:
        return ""
    if hangul > kana + han:
        return "ko"
    return "ja" if kana > 0.1 * han else "zh"


def language_shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of ``texts`` by :func:`language_tag`, without those that have none."""
    counts = Counter(language_tag(text) for text in texts)
    return {tag: count / len(texts) for tag, count in sorted(counts.items()) if tag}


_SENTENCE_END = re.compile(r"(?<=[.!?])\s|(?<=[。！？])|\n")
_APOSTROPHE = str.maketrans({"’": "'", "‘": "'", "＇": "'"})

# "As an AI, I don't have feelings" alone is no refusal: an answer mostly follows.
_ENGLISH = (
    # Not "I can't wait to help" nor "I cannot recommend it enough".
    r"\b(i|we) (can ?not|can't|could not|couldn't|won't|will not)\b(?! wait\b| \w+ [^.!?]*\benough\b)",
    r"\b(i|we)( am| are|'m|'re)( \w+)?? (unable|unwilling|"
    r"not (able|allowed|permitted|programmed|designed|going|willing|comfortable))\b",
    # Not "I'm sorry to hear that" nor "I'm sorry for your loss".
    r"\bi( am|'m)( \w+)?? sorry\b(?! (to hear|to learn|about|you|for (\w+ )?(loss|losses|delay|confusion))\b)",
    r"\b(i|we)( (must|have to|need to))?( \w+)?? (decline|refuse)\b",
    r"\bi (do not|don't) (provide|offer|condone|support|assist|engage|promote|encourage|feel comfortable)\b",
    r"\bi( am|'m)( \w+)?? (designed|programmed|trained) (not to|to avoid)\b",
    r"^(it is|it's|that is|this is) (inappropriate|unethical|illegal|not (appropriate|acceptable|ethical|okay))\b",
    r"\b(against|violates?) (my|our) (\w+ )?(guidelines|principles|programming|policy|policies|rules|values)\b",
    r"^(sorry|no[,.]|unfortunately)\b(?! (to hear|about|for (\w+ )?(loss|losses|delay|confusion))\b)",
)
_CHINESE = (
    r"^我?(很|非常|十分|真的|深表)?(抱歉|对不起|對不起|遗憾|遺憾|不好意思)",
    # Not "我们不能" alone, which is also how Chinese says that something cannot be done or concluded.
    r"我(不能|无法|無法|不会|不會|不可以|没有办法|沒有辦法|没办法|沒辦法|拒绝|拒絕|不便)",
    r"(不能|无法|無法|不会|不會|不便)(为|為|向|给|給)?(您|你)?"
    r"(提供|协助|協助|帮助|幫助|帮|幫|回答|满足|滿足|支持)",
    r"^作为(一个|一名|一款)?\w{0,6}(人工智能|AI|语言模型|助手)[^。！？]*(不能|无法|不会|不应|不得)",
    r"^作為(一個|一名|一款)?\w{0,6}(人工智慧|AI|語言模型|助手|助理)[^。！？]*(不能|無法|不會|不應|不得)",
)
_REFUSAL = re.compile("|".join((*_ENGLISH, *_CHINESE)), re.IGNORECASE)


def is_refusal(reply: str) -> bool:
    """Return whether the first two sentences read as a refusal, as "I can't help" or "很抱歉，我无法".

    Refusals in other words or languages are not recognised, and a reply that refuses and then
    complies counts as one.
    """
    sentences = _SENTENCE_END.split(reply.strip().translate(_APOSTROPHE), maxsplit=2)[:2]
    return _REFUSAL.search(" ".join(sentences)) is not None


# Ideographs and kana, which no space separates: for a regular expression's character class.
IDEOGRAPHS = r"\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W_{IDEOGRAPHS}]+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Return the casefolded words of ``text``, in order."""
    return _WORD.findall(text.casefold())


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all runs of ``n`` neighbours; none when there are fewer than ``n`` items."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def trigram_repetition(text: str) -> float:
    """Return the share of a reply's trigrams that occurred before in it, near 1 for a loop.

    ``a b a b a`` has the trigrams aba, bab, aba: one of three is a repeat. Replies below three
    words give 0.
    """
    grams = ngrams(split_words(text), 3)
    if grams:
        return 1.0 - len(set(grams)) / len(grams)
    return 0.0


def distinct_n(replies: Sequence[str], n: int = 2) -> float:
    """Return different n-grams over all n-grams of a set of replies (Li et al. 2016).

    It is 0 when no reply has ``n`` words. It falls with the size of the set, so compare sets of
    equal size only.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for reply in replies:
        counts.update(ngrams(split_words(reply), n))
    total = counts.total()
    return len(counts) / total if total else 0.0


def first_sentence(text: str) -> str:
    """Return the first sentence or line of a text, casefolded, with single spaces."""
    head = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    return " ".join(head.casefold().split())


def commonest_share(texts: Sequence[str]) -> float:
    """Return the share of the most frequent text; one refusal for every prompt gives nearly 1."""
    if texts:
        return Counter(texts).most_common(1)[0][1] / len(texts)
    return 0.0


SHORT_TOKENS = 4  # a reply of fewer tokens, its end marker included, says at most two words


def reply_statistics(
    replies: Sequence[str], lengths: Sequence[int], finished: Sequence[bool]
) -> dict[str, float]:
    """Return statistics of a set of replies as text, all 0 for none.

    docs/metrics.md gives healthy ranges.

    Args:
        replies: Without end markers.
        lengths: Tokens of each, end marker included.
        finished: Whether each ends by itself, and is not cut off by the limit of tokens.

    Returns:
        ``length``, mean number of tokens; ``repetition``, mean share of a reply's trigrams that
        occurred before in it; ``distinct_2``, different bigrams over all bigrams of the set; shares
        of replies: ``missing_eos`` that are cut off, ``short_replies`` of fewer than
        ``SHORT_TOKENS`` tokens; ``distinct_first_sentences`` over replies, and the share of the
        ``commonest_first_sentence``.
    """
    repetition = [trigram_repetition(reply) for reply in replies]
    missing_eos = [not ended for ended in finished]
    short_replies = [length < SHORT_TOKENS for length in lengths]
    first_sentences = [first_sentence(reply) for reply in replies]
    distinct = len(set(first_sentences))
    return {
        "length": mean(lengths),
        "repetition": mean(repetition),
        "distinct_2": distinct_n(replies, 2),
        "missing_eos": mean(missing_eos),
        "short_replies": mean(short_replies),
        "distinct_first_sentences": distinct / len(replies) if replies else 0.0,
        "commonest_first_sentence": commonest_share(first_sentences),
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


# White space, control, format (zero-width joiners and spaces, byte order marks, soft hyphens).
INVISIBLE_CATEGORIES = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
# Blanks that Unicode counts as letters, symbols or marks: Hangul and Khmer fillers, the empty
# braille pattern, the grapheme joiner, variation selectors.
INVISIBLE = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u034f") | {
    chr(c) for c in range(0xFE00, 0xFE10)
}

# Characters that neither show nor alter what others show: soft hyphens, zero-width spaces, marks of
# direction, fillers, byte order marks, variation selectors, tags.
_UNSEEN = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# Joiners change Arabic and Indic letters and emoji on both sides of them; elsewhere they have no
# effect.
_JOINERS = re.compile(r"[\u200c\u200d]+")
_JOINED = re.compile(r"[^\x00-\x7f\s]")
# Control characters other than white space, and marks that turn the direction of what follows.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def has_visible_text(text: str) -> bool:
    """Return whether ``text`` has a character that is neither white space nor invisible."""
    return any(
        c not in INVISIBLE and unicodedata.category(c) not in INVISIBLE_CATEGORIES for c in text
    )


def comparable(text: str) -> str:
    """Return a text as it is compared with others: NFC, single spaces, nothing invisible."""
    if not text.isascii():
        text = _JOINERS.sub(_needed_joiners, _UNSEEN.sub("", text))
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def _needed_joiners(run: re.Match[str]) -> str:
    """Return a run of joiners where it stands between characters that it can alter, else nothing."""
    before = run.string[max(run.start() - 1, 0) : run.start()]
    after = run.string[run.end() : run.end() + 1]
    if _JOINED.match(before) and _JOINED.match(after):
        return run[0]
    return ""


def escaped_controls(text: str) -> str:
    """Return a text with control characters, and marks of direction, as their escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def for_terminal(text: str) -> str:
    """Return lines of output as a terminal may print them, without control characters.

    Line breaks and tabs stay; carriage returns, which would write over a line, are escaped like
    other characters.
    """
    return "\n".join(escaped_controls(line).replace("\r", "\\r") for line in text.split("\n"))


class TerminalFormatter(logging.Formatter):
    """Writes log records, tracebacks among them, without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines that a terminal may print."""
        return for_terminal(redacted(super().format(record)))


TAKEN_OUT = "[taken out: looks like a key]"
EXCERPT = 160


@cache
def _key() -> re.Pattern[str]:
    """Return the pattern of everything that looks like a key, compiled when first asked for.

    What ran here on import would count for every stage that imports this module, and a new key cost
    a training run.
    """
    # A private key to its end, or all that follows where that is missing.
    private = (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)"
    )
    # In JSON a line break before a key is written as a backslash and a letter, so that the key
    # begins within a word.
    begin = r"(?:\b|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{4}))"
    keys = SECRETS.replace(r"\b", begin)
    return re.compile(f"{private}|{keys}", re.DOTALL)


def without_keys(text: str) -> str:
    """Return a text, or JSON as text, without anything that looks like a key."""
    return _key().sub(TAKEN_OUT, text)


def shortened(text: str, characters: int) -> str:
    """Return a text of at most so many characters, and an ellipsis if it was cut."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def safe_text(text: str) -> str:
    """Return a text without keys, with control characters as their escapes."""
    return escaped_controls(without_keys(text))


def excerpt(content: str) -> str:
    """Return the beginning of a row's content on one line, without keys."""
    return shortened(" ".join(without_keys(content).split()), EXCERPT)

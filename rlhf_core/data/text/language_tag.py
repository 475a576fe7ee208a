"""The language that the script of a text tells: which glyphs a browser should show for its ideographs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_KANA = re.compile(r"[\u3040-\u30ff]")
_HAN = re.compile(r"[\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_HANGUL = re.compile(r"[\uac00-\ud7a3]")
_LETTER = re.compile(r"[^\W\d_]")
# An ideograph stands for about three letters of an alphabet, so that a Chinese text may quote English or code.
MIN_SHARE = 0.25


def language_tag(text: str) -> str:
    """Return the language tag (BCP 47) of a Chinese, Japanese or Korean text, and "" for any other.

    These share ideographs, but not their shapes. Alphabets say less: English and Indonesian look the same.
    """
    letter_count = len(_LETTER.findall(text))
    kana, han, hangul = (len(script.findall(text)) for script in (_KANA, _HAN, _HANGUL))
    if not letter_count or kana + han + hangul < MIN_SHARE * letter_count:
        return ""
    if hangul > kana + han:
        return "ko"
    return "ja" if kana > 0.1 * han else "zh"


def language_shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of ``texts`` by :func:`language_tag`; those that it knows no language of are left out."""
    counts = Counter(language_tag(text) for text in texts)
    return {tag: count / len(texts) for tag, count in sorted(counts.items()) if tag}

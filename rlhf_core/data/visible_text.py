"""Whether a text shows anything: zero-width and other invisible characters alone are no text."""

from __future__ import annotations

import unicodedata

# White space, control, format (zero-width joiners and spaces, byte order marks, soft hyphens).
INVISIBLE_CATEGORIES = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
# Blanks that Unicode counts as letters, symbols or marks: Hangul and Khmer fillers, the empty braille pattern,
# the grapheme joiner, variation selectors.
INVISIBLE = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u034f") | {chr(c) for c in range(0xFE00, 0xFE10)}


def has_visible_text(text: str) -> bool:
    """Return whether ``text`` has a character that is neither white space nor invisible."""
    return any(c not in INVISIBLE and unicodedata.category(c) not in INVISIBLE_CATEGORIES for c in text)

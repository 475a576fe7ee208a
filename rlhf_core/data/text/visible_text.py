"""What a text shows: zero-width and other invisible characters are no text, and do not tell two texts apart."""

from __future__ import annotations

import re
import unicodedata

# White space, control, format (zero-width joiners and spaces, byte order marks, soft hyphens).
INVISIBLE_CATEGORIES = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
# Blanks that Unicode counts as letters, symbols or marks: Hangul and Khmer fillers, the empty braille pattern,
# the grapheme joiner, variation selectors.
INVISIBLE = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u034f") | {chr(c) for c in range(0xFE00, 0xFE10)}

# Characters that neither show nor alter what others show: soft hyphens, zero-width spaces, marks of direction,
# fillers, byte order marks, variation selectors, tags.
_UNSEEN = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# Joiners alter Arabic and Indic letters and emoji on both sides of them, and nothing elsewhere.
_JOINERS = re.compile(r"[\u200c\u200d]+")
_JOINED = re.compile(r"[^\x00-\x7f\s]")
# Control characters other than white space, and marks that turn the direction of what follows.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def has_visible_text(text: str) -> bool:
    """Return whether ``text`` has a character that is neither white space nor invisible."""
    return any(c not in INVISIBLE and unicodedata.category(c) not in INVISIBLE_CATEGORIES for c in text)


def comparable(text: str) -> str:
    """Return a text as it is compared with others: composed (NFC), single spaces, without invisible characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", _JOINERS.sub(_needed_joiners, _UNSEEN.sub("", text)))
    return " ".join(text.split())


def _needed_joiners(run: re.Match[str]) -> str:
    """Return a run of joiners as it is where it stands between characters that it can alter, else nothing."""
    before, after = run.string[max(run.start() - 1, 0) : run.start()], run.string[run.end() : run.end() + 1]
    return run[0] if _JOINED.match(before) and _JOINED.match(after) else ""


def escaped_controls(text: str) -> str:
    """Return a text with control characters, and marks that turn the direction of others, as their escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def for_terminal(text: str) -> str:
    """Return lines of output as a terminal may print them: nothing of the data controls it.

    Line breaks and tabs stay; carriage returns, which would write over a line, are escaped like other characters.
    """
    return "\n".join(escaped_controls(line).replace("\r", "\\r") for line in text.split("\n"))

"""Texts of the data as a page that people pass on may show them: without keys, control characters or great length."""

from __future__ import annotations

import re

from rlhf_core.data.text import escaped_controls

SECRETS = "|".join(
    (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\bsk-(?:[A-Za-z0-9_]+-)*[A-Za-z0-9]{20,}",
        r"\bgh[pousr]_[A-Za-z0-9]{36,}",
        r"\bgithub_pat_[A-Za-z0-9_]{50,}",
        r"\bglpat-[A-Za-z0-9_-]{20,}",
        r"\bhf_[A-Za-z0-9]{30,}",
        r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
        r"\bAIza[0-9A-Za-z_-]{35}",
        r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    )
)
TAKEN_OUT = "[taken out: looks like a key]"
EXCERPT = 160
# A private key to its end, or all that follows where that is missing.
_PRIVATE_KEY = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)"
# In JSON a line break before a key is written as a backslash and a letter, so that the key begins within a word.
_BEGIN = r"(?:\b|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{4}))"
_KEYS = SECRETS.replace(r"\b", _BEGIN)
_KEY = re.compile(f"{_PRIVATE_KEY}|{_KEYS}", re.DOTALL)


def without_keys(text: str) -> str:
    """Return a text, or JSON as text, without anything that looks like an access key or a private key."""
    return _KEY.sub(TAKEN_OUT, text)


def shortened(text: str, characters: int) -> str:
    """Return a text of at most so many characters, and an ellipsis if it was cut."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def safe_text(text: str) -> str:
    """Return a text without keys, with control characters as their escapes."""
    return escaped_controls(without_keys(text))


def excerpt(content: str) -> str:
    """Return the beginning of a row's content on one line, without anything that looks like a key."""
    return shortened(" ".join(without_keys(content).split()), EXCERPT)

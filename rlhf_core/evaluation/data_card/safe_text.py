"""Texts of the data as a page that people pass on may show them: without keys, control characters or great length."""

from __future__ import annotations

import re
from dataclasses import replace

from rlhf_core.data.text.visible_text import escaped_controls
from rlhf_core.data.validation.checks import SECRETS
from rlhf_core.evaluation.data_card.card import CardSection, CardTable, DataCard

TAKEN_OUT = "[taken out: looks like a key]"
LONGEST_CELL = 400
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


def safe_card(card: DataCard) -> DataCard:
    """Return the card with every text of it safe to print and pass on."""
    return replace(card, verdict=_safe(card.verdict), sections=[_safe_section(section) for section in card.sections])


def _safe_section(section: CardSection) -> CardSection:
    tables = [
        CardTable(
            tuple(_safe(cell) for cell in table.header),
            [tuple(_safe_cell(cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows],
        )
        for table in section.tables
    ]
    histograms = [replace(histogram, title=_safe(histogram.title)) for histogram in section.histograms]
    return replace(section, notes=[_safe(note) for note in section.notes], tables=tables, histograms=histograms)


def _safe_cell(text: str) -> str:
    return shortened(_safe(text), LONGEST_CELL)


def _safe(text: str) -> str:
    return escaped_controls(without_keys(text))

"""The data card as a page that people pass on may show it."""

from __future__ import annotations

from dataclasses import replace

from rlhf_core.data.safe_text import safe_text, shortened
from rlhf_core.evaluation.data_card.card import CardSection, CardTable, DataCard

LONGEST_CELL = 400


def safe_card(card: DataCard) -> DataCard:
    """Return the card with every text of it safe to print and pass on."""
    return replace(
        card, verdict=safe_text(card.verdict), sections=[_safe_section(section) for section in card.sections]
    )


def _safe_section(section: CardSection) -> CardSection:
    tables = [
        CardTable(
            tuple(safe_text(cell) for cell in table.header),
            [tuple(_safe_cell(cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows],
        )
        for table in section.tables
    ]
    histograms = [replace(histogram, title=safe_text(histogram.title)) for histogram in section.histograms]
    return replace(section, notes=[safe_text(note) for note in section.notes], tables=tables, histograms=histograms)


def _safe_cell(text: str) -> str:
    return shortened(safe_text(text), LONGEST_CELL)

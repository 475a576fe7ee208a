"""The data card as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.evaluation.data_card.card import CardSection, CardTable, DataCard, Histogram
from rlhf_core.evaluation.figures.format_number import format_number

BARS = "▁▂▃▄▅▆▇█"
# Characters with a meaning in Markdown or HTML, as they are written to mean themselves.
ESCAPED = str.maketrans(
    {"\\": "\\\\", "|": "\\|", "<": "&lt;", ">": "&gt;", "&": "&amp;", "*": "\\*", "`": "\\`", "[": "\\["}
)


def markdown(card: DataCard, title: str, quotes: bool) -> str:
    """Return the card; ``quotes`` includes the sections that quote texts of the data."""
    blocks = [f"# {title}", f"{_text(card.verdict)}."]
    for section in card.sections:
        if quotes or not section.quotes_rows:
            blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: CardSection) -> Iterator[str]:
    yield f"## {section.title}"
    if section.notes:
        yield "\n".join(f"- {_text(note)}" for note in section.notes)
    yield from (_table(table) for table in section.tables)
    if section.histograms:
        rows = [(h.title, f"{h.edges[0]} to {h.edges[-1]}", _bars(h)) for h in section.histograms]
        yield _table(CardTable(("histogram", "bins, in powers of two", ""), rows))


def _table(table: CardTable) -> str:
    rule = "".join("---:|" if numeric else "---|" for numeric in table.numeric)
    lines = [_line([_text(cell) for cell in table.header]), f"|{rule}"]
    lines += [_line([_text(format_number(cell)) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bars(histogram: Histogram) -> str:
    most = max(histogram.counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in histogram.counts)


def _text(text: str) -> str:
    return " ".join(text.split()).translate(ESCAPED)

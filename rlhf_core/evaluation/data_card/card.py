"""What a data card consists of, and the card as Markdown, as a page that needs no other file, and as a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.safe_text import safe_text, shortened
from rlhf_core.data.schema import write_table
from rlhf_core.data.validation.stored_rows import FINDINGS_SCHEMA, findings_table
from rlhf_core.evaluation.figures import bar_chart, format_number
from rlhf_core.storage.files import atomic_dir


@dataclass(frozen=True)
class Histogram:
    """How many lengths lie in (2^(i-1), 2^i] for every i from the first to the last that is needed."""

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, lengths: npt.NDArray[np.int64]) -> Histogram:
        """Count ``lengths``, of which there must be one at least; an empty text counts as one character."""
        exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        first, counts = int(exponents.min()), np.bincount(exponents - exponents.min())
        return cls(title, tuple(2 ** (first + i) for i in range(len(counts))), tuple(counts.tolist()))


@dataclass(frozen=True)
class CardTable:
    """A table; cells are text, numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | float | int | None, ...]]

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds no text and is aligned to the right, with its heading."""
        columns = range(len(self.header))
        return [bool(self.rows) and not any(isinstance(row[column], str) for row in self.rows) for column in columns]


@dataclass(frozen=True)
class CardSection:
    """A heading with what follows it. ``quotes_rows`` says that texts of the data are quoted in it."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[CardTable] = ()
    histograms: Sequence[Histogram] = ()
    quotes_rows: bool = False


@dataclass(frozen=True)
class DataCard:
    """The whole card: ``verdict`` is that of the data gate."""

    passed: bool
    verdict: str
    sections: list[CardSection] = field(default_factory=list)


LONGEST_CELL = 400
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
    lines += [_line([_text(_shown(cell)) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bars(histogram: Histogram) -> str:
    most = max(histogram.counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in histogram.counts)


def _text(text: str) -> str:
    return " ".join(text.split()).translate(ESCAPED)


def safe_card(part: Any) -> Any:
    """Return the card, or a part of it, with every text of it safe to print and pass on."""
    if isinstance(part, str):
        return safe_text(part)
    if isinstance(part, list | tuple):
        return type(part)(map(safe_card, part))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{name: safe_card(value) for name, value in vars(part).items()})
    return part


def _shown(cell: str | float | int | None) -> str:
    return shortened(format_number(cell), LONGEST_CELL)


SHORT_TEXT, LONGEST_WORD = 40, 28


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _shown
    environment.filters["bars"] = _bar_chart
    environment.filters["breakable"] = breakable
    environment.tests["long"] = is_long
    template = Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(card=card, title=title)


def is_long(cell: str | float | int | None) -> bool:
    """Whether a cell holds a text that may fill lines, or a path or word that must break to fit a narrow screen."""
    return isinstance(cell, str) and (len(cell) > SHORT_TEXT or max(map(len, cell.split()), default=0) > LONGEST_WORD)


def breakable(text: str) -> Markup:
    """Return a text, escaped, with places to break a line at after the folders of a path and the parts of a name."""
    parts = re.split(r"(?<=[/_])", shortened(text, LONGEST_CELL))
    return Markup("<wbr>").join(map(escape, parts))


def _bar_chart(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)


TITLE = "Data card"
FINDINGS_FILE = "findings.parquet"


def write_card(folder: Path, card: DataCard, findings: Sequence[RowFinding]) -> None:
    """Write ``card.html``, ``card.md``, ``release.md`` (without texts of the data) and ``findings.parquet``."""
    card = safe_card(card)
    with atomic_dir(folder) as target:
        (target / "card.html").write_text(page(card, TITLE), encoding="utf-8")
        (target / "card.md").write_text(markdown(card, TITLE, quotes=True), encoding="utf-8")
        (target / "release.md").write_text(markdown(card, TITLE, quotes=False), encoding="utf-8")
        write_table(target / FINDINGS_FILE, findings_table(findings, FINDINGS_SCHEMA))

"""The pages of a data card: its sections and tables as Markdown and as HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.data.text import safe_text, shortened
from rlhf_core.evaluation.figures import COLOURS, SERIES, draw_svg, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Histogram:
    """How many lengths lie in (2^(i-1), 2^i], for every i from the first needed to the last."""

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, lengths: npt.NDArray[np.int64]) -> Histogram:
        """Count ``lengths``, at least one; an empty text counts as one character."""
        logarithms = np.log2(np.maximum(lengths, 1))
        exponents = np.ceil(logarithms).astype(int)
        first, last = int(exponents.min()), int(exponents.max())
        counts = np.bincount(exponents - first)
        edges = tuple(2**exponent for exponent in range(first, last + 1))
        return cls(title, edges, tuple(counts.tolist()))


@dataclass(frozen=True)
class CardTable:
    """A table; cells are text, numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | float | int | None, ...]]

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds no text and is aligned to the right, with its heading."""
        if not self.rows:
            return [False] * len(self.header)
        numeric = []
        for column in zip(*self.rows, strict=True):
            numeric.append(not any(isinstance(cell, str) for cell in column))
        return numeric


@dataclass(frozen=True)
class CardSection:
    """A heading with what follows it; ``quotes_rows`` if texts of the data are quoted in it."""

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
    {
        "\\": "\\\\",
        "|": "\\|",
        "<": "&lt;",
        ">": "&gt;",
        "&": "&amp;",
        "*": "\\*",
        "`": "\\`",
        "[": "\\[",
    }
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
        rows = []
        for histogram in section.histograms:
            bins = f"{histogram.edges[0]} to {histogram.edges[-1]}"
            rows.append((histogram.title, bins, _bars(histogram)))
        yield _table(CardTable(("histogram", "bins, in powers of two", ""), rows))


def _table(table: CardTable) -> str:
    rule = "|"
    for numeric in table.numeric:
        rule += "---:|" if numeric else "---|"
    lines = [_line(table.header), rule]
    for row in table.rows:
        cells = [_shown(cell) for cell in row]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_text, cells)) + " |"


def _bars(histogram: Histogram) -> str:
    most = max(histogram.counts)
    bars = ""
    for count in histogram.counts:
        height = count * (len(BARS) - 1) / most
        bars += BARS[math.ceil(height)]
    return bars


def _text(text: str) -> str:
    return " ".join(text.split()).translate(ESCAPED)


def safe_card(part: Any) -> Any:
    """Return the card, or a part of it, with every text of it safe to print and pass on."""
    if isinstance(part, str):
        return safe_text(part)
    if isinstance(part, list | tuple):
        return type(part)(map(safe_card, part))
    if is_dataclass(part) and not isinstance(part, type):
        safe = {name: safe_card(value) for name, value in vars(part).items()}
        return replace(part, **safe)
    return part


def _shown(cell: str | float | int | None) -> str:
    return shortened(format_number(cell), LONGEST_CELL)


SHORT_TEXT, LONGEST_WORD = 40, 28


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _shown
    environment.filters["bars"] = _bar_chart
    environment.filters["breakable"] = breakable
    environment.tests["long"] = is_long
    template = Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(card=card, title=title)


def is_long(cell: str | float | int | None) -> bool:
    """Return whether a cell needs room: a text that may fill lines, or a long path or word."""
    if not isinstance(cell, str):
        return False
    longest_word = max(map(len, cell.split()), default=0)
    return len(cell) > SHORT_TEXT or longest_word > LONGEST_WORD


def breakable(text: str) -> Markup:
    """Return a text, escaped, that may break after folders of a path and parts of a name."""
    parts = re.split(r"(?<=[/_])", shortened(text, LONGEST_CELL))
    return Markup("<wbr>").join(map(escape, parts))


def _bar_chart(histogram: Histogram) -> Markup:
    labels = [str(edge) for edge in histogram.edges]
    return bar_chart(labels, histogram.counts, histogram.title)


MOST_LABELS, BAR_FONT_SIZE = 6, 17  # at most so many labels fit below the axis


def bar_chart(labels: Sequence[str], values: Sequence[float], title: str) -> Markup:
    """Draw a bar per value over its label, and the largest value above its bar.

    All values are read aloud.
    """

    def draw(axes: Axes) -> None:
        positions = range(len(values))
        axes.bar(positions, values, width=0.92, color=SERIES[0])
        every = math.ceil(len(labels) / MOST_LABELS)
        shown = [label.replace("$", r"\$") for label in labels[::every]]
        axes.set_xticks(positions[::every], shown)
        axes.tick_params(labelsize=BAR_FONT_SIZE)
        axes.set_yticks([])
        axes.axhline(0, color=COLOURS["line"], linewidth=1)
        axes.margins(x=0.01, y=0.14)
        largest = max(positions, key=values.__getitem__)
        axes.annotate(
            format_number(values[largest]),
            (largest, values[largest]),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=COLOURS["soft"],
            fontsize=BAR_FONT_SIZE,
        )

    listed = []
    for label, value in zip(labels, values, strict=True):
        listed.append(f"{label}: {format_number(value)}")
    return draw_svg(draw, f"{title}; {', '.join(listed)}")

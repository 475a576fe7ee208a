"""The data card as one HTML file that needs nothing else, with charts as SVG."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.evaluation.data_card.card import DataCard, Histogram
from rlhf_core.evaluation.figures import bar_chart, format_number

SHORT_TEXT, LONGEST_WORD = 40, 28


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = format_number
    environment.filters["bars"] = _bars
    environment.filters["breakable"] = breakable
    environment.tests["long"] = is_long
    template = Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(card=card, title=title)


def is_long(cell: str | float | int | None) -> bool:
    """Whether a cell holds a text that may fill lines, or a path or word that must break to fit a narrow screen."""
    return isinstance(cell, str) and (len(cell) > SHORT_TEXT or max(map(len, cell.split()), default=0) > LONGEST_WORD)


def breakable(text: str) -> Markup:
    """Return a text, escaped, with places to break a line at after the folders of a path and the parts of a name."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[/_])", text))


def _bars(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)

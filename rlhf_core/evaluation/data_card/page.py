"""The data card as one HTML file that needs nothing else, with charts as SVG."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf_core.evaluation.data_card.bar_chart import bar_chart
from rlhf_core.evaluation.data_card.card import DataCard, Histogram
from rlhf_core.evaluation.format_number import format_number


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = format_number
    environment.filters["bars"] = _bars
    template = Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(card=card, title=title)


def _bars(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)

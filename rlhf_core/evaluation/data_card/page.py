"""The data card as one HTML file that needs nothing else, in the style of the report."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf_core.evaluation.data_card.card import DataCard, Histogram
from rlhf_core.evaluation.report.bar_chart import bar_chart
from rlhf_core.evaluation.report.view import format_number


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    package = files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = format_number
    environment.filters["bars"] = _bars
    template = environment.from_string(package.joinpath("card.html.j2").read_text(encoding="utf-8"))
    style = files("rlhf_core.evaluation.report").joinpath("style.css").read_text(encoding="utf-8")
    return template.render(card=card, title=title, style=Markup(style))


def _bars(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)

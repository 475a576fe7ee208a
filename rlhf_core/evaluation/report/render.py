"""Render the report: one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.data.language_tag import language_tag
from rlhf_core.evaluation.format_number import format_number

PACKAGE = "rlhf_core.evaluation.report"


def render(context: Mapping[str, Any]) -> str:
    """Return the page for the context of :func:`~rlhf_core.evaluation.report.view.build_context`; text is escaped."""
    style = Markup(files(PACKAGE).joinpath("style.css").read_text(encoding="utf-8"))
    return _environment().get_template("page.html.j2").render(**context, style=style)


def lang_attribute(text: str) -> Markup:
    """Return the attribute ``lang`` of an element that holds ``text``, where its script tells it: else nothing."""
    tag = language_tag(text)
    return Markup(' lang="{}"').format(tag) if tag else Markup()


def breakable(text: str) -> Markup:
    """Let a browser break a long name after its dots and underscores, and nowhere else; numbers stay whole."""
    # In text that is already Markup the substitution would escape the tags that it puts in.
    return Markup(re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    environment.filters["lang"] = lang_attribute
    environment.filters["breakable"] = breakable
    return environment

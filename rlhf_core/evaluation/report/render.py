"""Render the report: one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.data.text import language_tag
from rlhf_core.evaluation.figures import format_number
from rlhf_core.evaluation.report.headline import BEGIN, END, ReleaseDecision

PACKAGE = "rlhf_core.evaluation.report"


def render(context: Mapping[str, Any]) -> str:
    """Return the page for the context of :func:`~rlhf_core.evaluation.report.view.build_context`; text is escaped."""
    style = Markup(files(PACKAGE).joinpath("style.css").read_text(encoding="utf-8"))
    markers = {"release_begin": Markup(BEGIN), "release_end": Markup(END)}
    return _environment().get_template("page.html.j2").render(**context, **markers, style=style)


def with_release(report: str, decision: ReleaseDecision) -> str | None:
    """Return a copy of a report that says what was released; None where ``report`` has no place for it.

    Everything else stays as it was rendered, so that the copy shows what the decision was made on.
    """
    before, begin, rest = report.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return None
    return before + _environment().get_template("release.html.j2").render(release=decision) + after


def lang_attribute(text: str) -> Markup:
    """Return the attribute ``lang`` of an element that holds ``text``, where its script tells it: else nothing."""
    tag = language_tag(text)
    return Markup(' lang="{}"').format(tag) if tag else Markup()


def breakable(text: str) -> Markup:
    """Let a browser break a long name after its dots and underscores, and nowhere else; numbers stay whole."""
    # In text that is already Markup the substitution would escape the tags that it puts in.
    return Markup(re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def commands(text: str) -> Markup:
    """Show what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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
    environment.filters["commands"] = commands
    return environment

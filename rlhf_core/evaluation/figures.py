"""Small charts as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def format_number(value: Any, digits: int = 3) -> str:
    """Format a number with ``digits`` decimals and separated thousands.

    Whole numbers, those of one and below apart, have no decimals; None is an empty text.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 2):
        return f"{int(value):,}"
    return f"{value:z,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


def format_interval(low: Any, high: Any, digits: int = 2) -> str:
    """Format the two ends of an interval as :func:`format_number` does: ``0.50 to 0.61``."""
    return f"{format_number(low, digits)} to {format_number(high, digits)}"


PIXELS_PER_INCH = 72  # of the SVG backend
WIDTH = 460
HEIGHT = 230
FONT_SIZE = 13
# Colours of the light page, by the name of their CSS variable.
COLOURS = {
    "s0": "#2a62c9",
    "s1": "#d1661c",
    "s2": "#2b8a57",
    "s3": "#8d4bbd",
    "s4": "#b0354f",
    "soft": "#626b76",
    "line": "#dfe2e6",
    "open": "#9a6700",
}
SERIES = tuple(COLOURS[name] for name in ("s0", "s1", "s2", "s3", "s4"))
# With these the same numbers give the same bytes, and texts stay texts in the page's own font.
SVG_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": FONT_SIZE,
    "svg.id": None,
}


def draw_svg(draw: Callable[[Axes], None], title: str, height: int = HEIGHT) -> Markup:
    """Let ``draw`` draw on axes without frame, and return the figure as an ``<svg>`` element.

    Args:
        draw: Uses the colours of :data:`COLOURS`, which become the page's CSS variables.
        title: Read aloud in place of the picture.
        height: In pixels; the width is :data:`WIDTH`. The page scales both.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SVG_SETTINGS):
        figure = Figure(
            figsize=(WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH), layout="constrained"
        )
        axes = figure.add_subplot()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=COLOURS["soft"])
        draw(axes)
        stream = io.StringIO()
        figure.savefig(
            stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return Markup(_inline(stream.getvalue(), title, height))


def _inline(document: str, title: str, height: int) -> str:
    """Keep the drawing of a whole SVG document, without what a page must not have twice or load."""
    body = document[document.index(">", document.index("<svg")) + 1 :]
    body = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>|<!--.*?-->",
        "",
        body,
        flags=re.DOTALL,
    )
    # Groups are named alike in every figure of the page: only what is referred to needs a name.
    body = re.sub(r' id="([^"]*)"', lambda name: name[0] if f"#{name[1]}" in body else "", body)
    body = re.sub(r' transform="rotate\(-0[^"]*"|font-family: [^;"]*;? ?', "", body)
    # Frames that are neither filled nor drawn leave empty groups within empty groups.
    body = re.sub(r'<path d="[^"]*" style="fill: none"/>|<g/>', "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    while (smaller := re.sub(r"<(g|defs)> ?</\1> ?", "", body)) != body:
        body = smaller
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}<title>{escape(title)}</title>{body.strip()}"

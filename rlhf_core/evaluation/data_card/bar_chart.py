"""A bar chart as SVG in the colours of the page, for histograms."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 230
BASE, TOP, LEFT, RIGHT = HEIGHT - 26, 20, 6, 12
GAP = 2
LABELS = 8  # at most so many labels fit below the axis


def bar_chart(labels: Sequence[str], values: Sequence[float], title: str) -> Markup:
    """Draw a bar per value with labels below and the largest value above its bar."""
    most, step = max(values), (WIDTH - LEFT - RIGHT) / len(values)
    every = -(-len(labels) // LABELS)
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{BASE}" y2="{BASE}"/>']
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        x, height = LEFT + i * step, (BASE - TOP) * value / most if most else 0.0
        middle = x + step / 2
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{BASE - height:.1f}" width="{max(step - GAP, 1):.1f}" '
            f'height="{height:.1f}"><title>{escape(label)}: {value:g}</title></rect>'
        )
        if i % every == 0:
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>'
            )
        if value == most and value not in values[:i]:
            parts.append(f'<text class="tick" x="{middle:.1f}" y="{TOP - 6}" text-anchor="middle">{value:g}</text>')
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return Markup(f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>")

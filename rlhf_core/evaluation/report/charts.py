"""Small SVG charts that follow the page's light or dark colours (classes ``s0`` to ``s4`` are styled by style.css).

Every chart is a string of trusted SVG; all labels pass through ``escape``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 30
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line. Points whose y is not finite break it."""

    label: str
    points: list[Point]


@dataclass(frozen=True)
class Band:
    """A filled range: lower and upper edge over the same x values."""

    label: str
    low: list[Point]
    high: list[Point]


@dataclass(frozen=True)
class AxisScale:
    """Linear map from the values [low, high] to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(series: Sequence[Series], bands: Sequence[Band] = (), x_label: str = "step", title: str = "") -> Markup:
    """Draw lines over bands with axes of three to six ticks, and a legend for more than one line or band."""
    points = [p for s in series for p in s.points] + [p for b in bands for p in (*b.low, *b.high)]
    points = [p for p in points if math.isfinite(p[1])]
    if not points:
        return Markup('<p class="missing">no finite values</p>')
    x, y = _scales(points)
    body = [_axes(x, y, x_label)]
    body += [
        f'<path class="band b{i}" d="{_path(b.high, x, y)}{_path(b.low[::-1], x, y, "L")}Z"/>'
        for i, b in enumerate(bands)
    ]
    body += [f'<path class="line s{i}" d="{_lines(s.points, x, y)}"/>' for i, s in enumerate(series)]
    names = [(f"s{i}", s.label) for i, s in enumerate(series)] + [(f"b{i}", b.label) for i, b in enumerate(bands)]
    return _svg("".join(body), title) + (_legend(names) if len(names) > 1 else Markup())


def interval_chart(rows: Sequence[tuple[str, float, float, float]], centre: float, title: str = "") -> Markup:
    """Draw one interval per (label, low, value, high) in [0, 1], with a vertical rule at ``centre``."""
    height = 34 * len(rows) + 34
    x = AxisScale(0.0, 1.0, 110, WIDTH - RIGHT)
    parts = [f'<line class="rule" x1="{x(centre):.1f}" x2="{x(centre):.1f}" y1="6" y2="{height - 24}"/>']
    for i, (label, low, value, high) in enumerate(rows):
        y = 22 + 34 * i
        parts.append(
            f'<text class="tick" x="102" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
            f'<line class="line s0" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="dot" cx="{x(value):.1f}" cy="{y}" r="5"/>'
        )
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    return _svg("".join(parts), title, height)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers (1, 2 or 5 times a power of ten) inside [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _scales(points: Sequence[Point]) -> tuple[AxisScale, AxisScale]:
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    right = max(xs) if max(xs) > min(xs) else min(xs) + 1
    return AxisScale(min(xs), right, LEFT, WIDTH - RIGHT), AxisScale(low - pad, high + pad, HEIGHT - BOTTOM, TOP)


def _axes(x: AxisScale, y: AxisScale, x_label: str) -> str:
    parts = []
    for tick in nice_ticks(y.low, y.high, 4):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in nice_ticks(x.low, x.high):
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{_short(tick)}</text>'
        )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_label)}</text>')
    return "".join(parts)


def _path(points: Sequence[Point], x: AxisScale, y: AxisScale, start: str = "M") -> str:
    finite = [p for p in points if math.isfinite(p[1])]
    return "".join(f"{start if i == 0 else 'L'}{x(px):.1f} {y(py):.1f}" for i, (px, py) in enumerate(finite))


def _lines(points: Sequence[Point], x: AxisScale, y: AxisScale) -> str:
    """A path that is interrupted where y is not finite."""
    parts, pen_down = [], False
    for px, py in points:
        if math.isfinite(py):
            parts.append(f"{'L' if pen_down else 'M'}{x(px):.1f} {y(py):.1f}")
        pen_down = math.isfinite(py)
    return "".join(parts)


def _legend(names: Sequence[tuple[str, str]]) -> Markup:
    items = [Markup('<span><i class="key {}"></i>{}</span>').format(css, label) for css, label in names]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(items))


def _svg(body: str, title: str, height: int = HEIGHT) -> Markup:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(f"{head}<title>{escape(title)}</title>{body}</svg>")


def _short(value: float) -> str:
    if value != 0 and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"

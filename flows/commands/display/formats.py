"""Durations, rates and metrics as the display of a run writes them."""

from __future__ import annotations

from collections.abc import Mapping


def format_seconds(seconds: float) -> str:
    """Format a duration in at most six characters for a hundred days: ``0:07``, ``12:30``, ``3h05m``, ``2d04h``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def format_age(seconds: float) -> str:
    """Format how long ago something was in whole units: ``just now``, ``20 minutes ago``, ``3 days ago``."""
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def format_rate(per_second: float) -> str:
    """Format a rate as ``14/s``, or below one per second as ``3.2 s each``."""
    return f"{per_second:.3g}/s" if per_second >= 1 else f"{1 / per_second:.3g} s each"


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format the metrics of a progress line: ``loss 0.41``, ``17.8k tokens/s`` for one that is called ``tokens_s``."""
    return [
        f"{_thousands(value)} {name.removesuffix('_s')}/s" if name.endswith("_s") else f"{name} {value:.3g}"
        for name, value in metrics.items()
    ]


def _thousands(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"

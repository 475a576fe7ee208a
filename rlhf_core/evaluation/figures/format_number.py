"""Numbers as report and data card show them."""

from __future__ import annotations

from typing import Any


def format_number(value: Any, digits: int = 3) -> str:
    """Format a number with ``digits`` decimals and separated thousands, whole numbers without decimals."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 2):
        return f"{int(value):,}"
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"

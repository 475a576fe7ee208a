"""What a record looks like, in a few words for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = 20
KEY_LENGTH = 60


def printable(text: str) -> str:
    """Return ``text`` as every terminal can print it: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def record_shape(value: Any) -> str:
    """Return the keys of a record, with the types of values other than text, or the type of another value."""
    if not isinstance(value, dict):
        return type(value).__name__
    names = [
        str(name)[:KEY_LENGTH] + ("" if isinstance(item, str) else f" ({type(item).__name__})")
        for name, item in value.items()
    ]
    return f"keys {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return the first twenty names, and how many there are beside them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return printable(", ".join(names[:SHOWN])) + more if names else "none"

"""Reasons and names as they are recorded and listed: one line each, which looks like nothing but itself."""

from __future__ import annotations


def printed_line(text: str) -> str:
    """Return ``text`` on one line, without control characters: in a list they could imitate or hide other entries."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())

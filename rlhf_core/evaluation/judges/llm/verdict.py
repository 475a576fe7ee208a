"""Read the verdict in an answer of the LLM judge; what is not a verdict is junk and never guessed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PREFERRED = {"a": "A", "b": "B", "tie": "tie"}


@dataclass(frozen=True)
class Verdict:
    """Which reply the model prefers: ``A``, ``B`` or ``tie``, and its reason."""

    preferred: str
    reason: str


def read_verdict(text: str) -> Verdict | None:
    """Return the verdict of the JSON objects in ``text`` that have one; None if there is none or they contradict.

    Text around the object (a code fence, reasoning before it) does not matter.
    """
    verdicts = []
    for value in _json_objects(text):
        preferred = value.get("verdict")
        if isinstance(preferred, str) and preferred.strip().lower() in PREFERRED:
            reason = value.get("reason")
            verdicts.append(Verdict(PREFERRED[preferred.strip().lower()], reason if isinstance(reason, str) else ""))
        elif preferred is not None:
            return None
    if len({verdict.preferred for verdict in verdicts}) != 1:
        return None
    return verdicts[-1]


def _json_objects(text: str) -> list[dict[str, Any]]:
    """All JSON objects in a text that are not part of another."""
    decoder = json.JSONDecoder()
    objects = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            end = start + 1
        else:
            objects.append(value)
        start = text.find("{", end)
    return objects

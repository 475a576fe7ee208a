"""Read the verdict in an answer of the LLM judge; what is not a verdict is junk and never guessed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PREFERRED = {"a": "A", "b": "B", "tie": "tie"}
# Reading takes up to the square of the length, where many objects begin and none ends. No verdict needs as much.
LONGEST_ANSWER = 100_000


@dataclass(frozen=True)
class Verdict:
    """Which reply the model prefers: ``A``, ``B`` or ``tie``, and its reason."""

    preferred: str
    reason: str


def read_verdict(text: str) -> Verdict | None:
    """Return the verdict of the JSON objects in ``text`` that have one; None if there is none or they contradict.

    Text around the object (a code fence, reasoning before it) does not matter. An answer of more than
    ``LONGEST_ANSWER`` characters has no verdict.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    try:
        objects = _json_objects(text)
    except RecursionError:
        return None
    verdicts = []
    for value in objects:
        preferred = value.get("verdict")
        if isinstance(preferred, str) and preferred.strip().lower() in PREFERRED:
            reason = value.get("reason")
            verdicts.append(Verdict(PREFERRED[preferred.strip().lower()], _writable(reason)))
        elif preferred is not None:
            return None
    if len({verdict.preferred for verdict in verdicts}) != 1:
        return None
    return verdicts[-1]


def _writable(reason: Any) -> str:
    """The reason if it is a text, without lone surrogates, which cannot be written to a file."""
    return reason.encode("utf-8", "replace").decode() if isinstance(reason, str) else ""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one that names ``verdict`` twice, and differently, has one that is none."""
    value = dict(pairs)
    verdicts = [item for name, item in pairs if name == "verdict"]
    return value | {"verdict": verdicts} if any(item != verdicts[0] for item in verdicts) else value


def _json_objects(text: str) -> list[dict[str, Any]]:
    """All JSON objects in a text that are not part of another; ``RecursionError`` if one is nested without measure."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
    objects = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:  # no JSON, or a number of thousands of digits
            end = start + 1
        else:
            objects.append(value)
        start = text.find("{", end)
    return objects

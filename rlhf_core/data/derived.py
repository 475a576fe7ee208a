"""Kinds of rows that are derived from others: demonstrations, prompts and pretraining text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.data.formats import dialogue_text
from rlhf_core.data.schema import ROW_TYPES, content_id

Rows = dict[str, list[dict[str, Any]]]
# In the order of ROW_TYPES every kind comes after those that it is derived from.
DERIVED_FROM = {
    "demonstrations": ("preferences",),
    "prompts": ("preferences", "demonstrations"),
    "pretrain": ("demonstrations",),
}
LABELS = ("category", "source", "group", "path", "position")


def derive_missing(rows: Mapping[str, Sequence[dict[str, Any]]]) -> tuple[Rows, dict[str, str]]:
    """Add the kinds that ``rows`` lacks.

    Demonstrations come from chosen replies, prompts from all prompts, pretraining text from demonstrations. Derived
    rows are distinct, and keep the group of the row that they come from. A kind that was given but has no usable row
    stays empty: the data gate reports it. So do preferences, which nothing gives, and a kind whose parents are empty.

    Returns:
        The rows of all kinds, and by kind what it was derived from (empty if it was given).
    """
    derived = dict.fromkeys(ROW_TYPES, "")
    full = {"preferences": [], **{kind: list(listed) for kind, listed in rows.items()}}
    for kind, parents in DERIVED_FROM.items():
        if kind not in full:
            derived[kind] = ", ".join(parents)
            full[kind] = derive(kind, [row for parent in parents for row in full[parent]])
    return full, derived


def derive(kind: str, parents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the distinct rows of ``kind`` that come from ``parents``, with ids; of equal rows the first.

    They have the labels of their parent, and its file and line where these are given. Of a ranking, which gives several
    pairs, only the best reply is imitated: not one that another pair of the same record rejects.
    """
    kept: dict[str, dict[str, Any]] = {}
    listed = list(parents)
    pairs = [row for row in listed if kind == "demonstrations" and "path" in row and row["chosen"] != row["rejected"]]
    worse = {_reply_key(row, row["rejected"]) for row in pairs}
    for parent in listed:
        if worse and _reply_key(parent, parent["chosen"]) in worse:
            continue
        row = {name: parent[name] for name in LABELS if name in parent}
        if kind == "demonstrations":
            row |= {"prompt": parent["prompt"], "reply": parent["chosen"]}
        elif kind == "prompts":
            row |= {"prompt": parent["prompt"]}
        else:
            row |= {"text": dialogue_text(parent["prompt"], parent["reply"])}
        key = content_id(kind, row)
        kept.setdefault(key, row | {"id": key})
    return list(kept.values())


def _reply_key(row: Mapping[str, Any], reply: str) -> tuple[str, int, str, str]:
    """Return what is the same for a reply in all pairs of one record."""
    return row["path"], row["position"], row["group"], reply

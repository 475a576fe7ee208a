"""Kinds of rows that are derived from others: demonstrations, prompts and pretraining text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def derived_from(given: Collection[str], also: Collection[str] = ()) -> dict[str, str]:
    """Return by kind what it is derived from; empty for those that are ``given``, or that nothing is at hand for.

    Kinds in ``also`` are derived although they are given.

    Demonstrations come from chosen replies, prompts from all prompts, pretraining text from demonstrations. Preferences
    are derived from nothing, and a kind that was given but has no usable row stays empty: the data gate reports it.
    """
    derived: dict[str, str] = {}
    for kind in ROW_TYPES:
        parents = [parent for parent in DERIVED_FROM.get(kind, ()) if parent in given or derived[parent]]
        derived[kind] = ", ".join(parents) if kind in also or kind not in given else ""
    return derived


def derive(kind: str, parents: Iterable[Mapping[str, Any]], seen: set[str]) -> list[dict[str, Any]]:
    """Return the distinct rows of ``kind`` that come from ``parents``, with ids; of equal rows the first.

    They have the labels of their parent, and its file and line where these are given. Of a ranking, which gives several
    pairs, only the best reply is imitated: not one that another pair of the same record rejects.

    Args:
        parents: Rows, with all rows of a record that one of them is of.
        seen: Ids of rows that were derived before; those of the new rows are added.
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
        if key not in seen:
            kept.setdefault(key, row | {"id": key})
    seen.update(kept)
    return list(kept.values())


def _reply_key(row: Mapping[str, Any], reply: str) -> tuple[str, int, str, str]:
    """Return what is the same for a reply in all pairs of one record."""
    return row["path"], row["position"], row["group"], reply

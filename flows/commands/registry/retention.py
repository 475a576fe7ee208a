"""The output of ``rlhf gc``: what is kept and why, and what goes."""

from __future__ import annotations

from pathlib import Path

from flows.registry.retention import RetentionPlan
from rlhf_core.data.tokens.unneeded_entries import remove_entries, unneeded_entries

MIB = 1 << 20


def describe_retention(plan: RetentionPlan, *, deleted: bool) -> str:
    """List every version of each registered model with the reason why it stays, or that it goes.

    Args:
        deleted: Whether the plan has been carried out.
    """
    lines = []
    for model in plan.models:
        lines.append(model.name)
        rows = [(int(number), f"kept: {reason}") for number, reason in model.kept.items()]
        rows += [(int(version.version), "deleted" if deleted else "would be deleted") for version in model.deleted]
        lines += [f"  version {number}  {what}" for number, what in sorted(rows, reverse=True)]
        lines += [] if rows else ["  no version"]
    versions, matches = len(plan.deleted), len(plan.matches)
    counts = f"{versions} version{'' if versions == 1 else 's'} and {matches} match{'' if matches == 1 else 'es'}"
    if deleted:
        lines.append(f"deleted {counts}")
    elif plan.deleted:
        lines.append(f"nothing was deleted; `rlhf gc --delete` deletes {counts}")
    else:
        lines.append("nothing to delete")
    return "\n".join(lines)


def clean_token_cache(workspace: Path, *, delete: bool) -> list[str]:
    """List the token ids that no stage needs any more, or delete them; a line for each, none where there are none."""
    entries = unneeded_entries(workspace)
    if delete:
        remove_entries(entries)
    what = "deleted" if delete else "would be deleted"
    lines = [f"  {entry.folder.name}  {entry.size / MIB:.1f} MiB  {what}: {entry.reason}" for entry in entries]
    return ["token ids of data files", *lines] if lines else []

"""What ``rlhf registry gc`` prints of registered models: which versions stay, and why."""

from __future__ import annotations

from rlhf_extras.retention.retention import RetentionPlan


def describe_retention(plan: RetentionPlan, *, deleted: bool) -> str:
    """List every version of each registered model with the reason why it stays, or that it goes.

    Args:
        deleted: Whether the plan has been carried out.
    """
    lines = []
    gone = "deleted" if deleted else "would be deleted"
    for name, rows in plan.models.items():
        lines.append(name)
        if not rows:
            lines.append("  no version")
        for version, why in rows:
            fate = f"kept: {why}" if why else gone
            lines.append(f"  version {version.version}  {fate}")
    if plan.orphans:
        lines.append(f"{plan.orphans.describe()}: {gone} and ended")
    versions, matches = len(plan.deleted), len(plan.matches)
    counts = "1 version" if versions == 1 else f"{versions} versions"
    counts += " and 1 match" if matches == 1 else f" and {matches} matches"
    if deleted:
        lines.append(f"deleted {counts}")
    elif plan.deleted:
        lines.append(f"nothing was deleted; `rlhf registry gc --delete` deletes {counts}")
    elif plan.orphans:
        lines.append("nothing was deleted; `rlhf registry gc --delete` deletes that")
    else:
        lines.append("no version to delete")
    return "\n".join(lines)

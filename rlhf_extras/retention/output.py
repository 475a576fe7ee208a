"""What ``rlhf registry gc`` prints of registered models: which versions stay, and why."""

from __future__ import annotations

from rlhf_extras.retention.retention import RetentionPlan


def describe_retention(plan: RetentionPlan, *, deleted: bool) -> str:
    """List every version of each registered model with the reason why it stays, or that it goes.

    Args:
        deleted: Whether the plan has been carried out.
    """
    lines = []
    for name, rows in plan.models.items():
        lines += [name, *([] if rows else ["  no version"])]
        gone = "deleted" if deleted else "would be deleted"
        lines += [
            f"  version {version.version}  {f'kept: {why}' if why else gone}"
            for version, why in rows
        ]
    if plan.orphans:
        lines.append(
            f"{plan.orphans.describe()}: {'deleted and ended' if deleted else 'would be deleted and ended'}"
        )
    versions, matches = len(plan.deleted), len(plan.matches)
    counts = f"{versions} version{'' if versions == 1 else 's'} and {matches} match{'' if matches == 1 else 'es'}"
    if deleted:
        lines.append(f"deleted {counts}")
    elif plan.deleted:
        lines.append(f"nothing was deleted; `rlhf registry gc --delete` deletes {counts}")
    elif plan.orphans:
        lines.append("nothing was deleted; `rlhf registry gc --delete` deletes that")
    else:
        lines.append("no version to delete")
    return "\n".join(lines)

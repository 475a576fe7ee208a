"""What training a policy cost, as the histories of its stages recorded it: seconds and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.training.history import read_history

# The stages beside its own that a method needs a model of. DPO reads the pairs themselves.
UPSTREAM = {"ppo": ("reward", "referee", "critic"), "rejection_sampling": ("reward",), "dpo": ()}
SECONDS = "seconds_"  # the fields of a history with one row per iteration


@dataclass(frozen=True)
class TrainingCost:
    """None is what the histories do not say.

    Attributes:
        seconds: Time of the training loops by stage, ``policy`` first: without start-up, loading and saving.
        sampled_tokens: Reply tokens that were generated to train the policy.
        trained_tokens: Tokens that supervised steps of the policy were made on, padding not counted.
    """

    seconds: Mapping[str, float]
    sampled_tokens: int | None = None
    trained_tokens: int | None = None

    @property
    def total_seconds(self) -> float | None:
        """The sum over the stages; None where no history says anything of the policy's."""
        return sum(self.seconds.values()) if "policy" in self.seconds else None


def training_cost(workspace: Path, method: str, batch_size: int, selects: bool) -> TrainingCost:
    """Read the histories of the stages that ``method`` needs.

    Args:
        workspace: Its folder ``history``.
        method: ``policy.method``.
        batch_size: Replies per iteration of PPO, whose history has their mean length.
        selects: Whether the referee chose the checkpoint, without which PPO needs none.
    """
    rows = _rows(workspace, "ppo") + _rows(workspace, "ppo_abandoned")
    seconds = {"policy": _seconds(rows)}
    for stage in UPSTREAM[method]:
        if selects or stage != "referee":
            seconds[stage] = _seconds(_rows(workspace, stage))
    lengths = [row["length"] for row in rows if "length" in row]
    trained = [row["tokens"] for row in rows if "tokens" in row]
    sampled = [row["sampled_tokens"] for row in rows if "sampled_tokens" in row]
    if method == "ppo" and lengths:
        sampled = [round(batch_size * sum(lengths))]
    return TrainingCost(
        {stage: value for stage, value in seconds.items() if value is not None},
        sampled_tokens=max(sampled, default=None),
        trained_tokens=max(trained, default=None),
    )


def _rows(workspace: Path, stage: str) -> list[dict[str, Any]]:
    path = workspace / "history" / f"{stage}.jsonl"
    return read_history(path) if path.is_file() else []


def _seconds(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The time of a history: rows of the supervised loop carry the total so far, those of iterations their parts."""
    rows = list(rows)
    totals = [row["seconds"] for row in rows if "seconds" in row]
    parts = [value for row in rows for name, value in row.items() if name.startswith(SECONDS)]
    return sum(parts) + max(totals, default=0.0) if totals or parts else None

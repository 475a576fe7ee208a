"""What training a policy cost, as the histories of its stages recorded it: seconds and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.policy import Method

Histories = Mapping[str, Sequence[Mapping[str, Any]]]
# The stages beside its own that a method needs a model of. DPO reads the pairs themselves.
UPSTREAM: Mapping[Method, tuple[str, ...]] = {
    "ppo": ("critic", "reward", "referee"),
    "rejection_sampling": ("reward",),
    "dpo": (),
}
POLICY = "policy"
PHASES = "seconds_"  # what the times of the phases of an iteration begin with


@dataclass(frozen=True)
class TrainingCost:
    """What the histories do not say is None, or left out.

    Attributes:
        seconds: Time of the training loops by stage, that of the policy first: without start-up, loading and saving.
        sampled_tokens: Reply tokens that were generated to train the policy.
        trained_tokens: Tokens that supervised steps of the policy were made on, padding not counted.
        total_seconds: The sum of ``seconds``; None where the time of what the method is named after is not known.
    """

    seconds: Mapping[str, float]
    sampled_tokens: int | None
    trained_tokens: int | None
    total_seconds: float | None


def training_cost(histories: Histories, method: Method, batch_size: int | None, selects: bool = True) -> TrainingCost:
    """Sum up the histories of the stages that ``method`` needs.

    Args:
        histories: Rows by the name of the history file.
        method: How the policy was trained.
        batch_size: Replies per iteration of PPO, whose history has their mean length; None if unknown.
        selects: Whether the referee chose the checkpoint, without which PPO needs none.
    """
    rows = [*histories.get("ppo", ()), *histories.get("ppo_abandoned", ())]
    of_stage = {POLICY: _seconds(rows)}
    for stage in UPSTREAM[method]:
        if selects or stage != "referee":
            of_stage[stage] = _seconds(histories.get(stage, ()))
    seconds = {stage: value for stage, value in of_stage.items() if value is not None}
    sampled = [row["sampled_tokens"] for row in rows if "sampled_tokens" in row]
    lengths = [row["length"] for row in rows if "length" in row]
    if method == "ppo" and batch_size is not None and lengths:
        sampled = [round(batch_size * sum(lengths))]
    return TrainingCost(
        seconds,
        sampled_tokens=max(sampled, default=None),
        trained_tokens=max((row["tokens"] for row in rows if "tokens" in row), default=None),
        total_seconds=sum(seconds.values()) if POLICY in seconds else None,
    )


def best_of_n_cost(histories: Histories) -> TrainingCost:
    """Best of n trains no policy, but needs the reward model that chooses."""
    seconds = _seconds(histories.get("reward", ()))
    return TrainingCost({} if seconds is None else {"reward": seconds}, None, None, seconds)


def _seconds(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The time of a history: rows of the supervised loop carry the total so far, those of iterations their parts."""
    rows = list(rows)
    totals = [row["seconds"] for row in rows if "seconds" in row]
    parts = [value for row in rows for name, value in row.items() if name.startswith(PHASES)]
    return sum(parts) + max(totals, default=0.0) if totals or parts else None

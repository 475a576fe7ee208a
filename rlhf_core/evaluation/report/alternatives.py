"""The table "Was PPO worth it?": SFT, best of n by the reward model, and the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]


def alternatives(evaluation: Mapping[str, Any]) -> list[JsonObject]:
    """Return one row for each way to a reply; none where the evaluation has no best of n.

    ``sampled`` counts the tokens that are generated for each reply that is used. What is not known is None.
    """
    best = evaluation.get("best_of_n")
    if best is None:
        return []
    comparison = evaluation.get("comparison", {})
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    return [
        _row("SFT", sft, {}, 0.0, sft.get("length")),
        _row(
            f"best of {best['n']}", best, best["comparison"], best["kl_bound"], best["sampled_tokens_per_reply"], "≤ "
        ),
        _row("policy", policy, comparison, evaluation.get("kl"), policy.get("length")),
    ]


def _row(
    name: str,
    side: Mapping[str, Any],
    against_sft: Mapping[str, JsonObject],
    kl: float | None,
    sampled: float | None,
    kl_prefix: str = "",
) -> JsonObject:
    return {
        "name": name,
        "gold": side.get("gold"),
        "judge": side.get("judge"),
        "by_judge": against_sft.get("judge", {}),
        "by_gold": against_sft.get("gold", {}),
        "kl": kl,
        "kl_prefix": kl_prefix,
        "length": side.get("length"),
        "sampled": sampled,
    }

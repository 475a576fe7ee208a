"""The table "Was PPO worth it?": SFT, best of n by the reward model, and the policy by the method that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.evaluation.training_cost import Histories, best_of_n_cost, training_cost

JsonObject = dict[str, Any]


def method_of(training: Mapping[str, Any]) -> Method:
    """Return how the policy was trained, by the content of ``metrics/ppo.json``, where PPO names no method."""
    method: Method = training.get("method", "ppo")
    return method


def alternatives(
    evaluation: Mapping[str, Any], method: Method = "ppo", histories: Histories | None = None
) -> list[JsonObject]:
    """Return one row for each way to a reply; none where there is but PPO.

    ``sampled`` counts the tokens that are generated for each reply that is used, ``seconds`` the time of training after
    SFT. What is not known is None.
    """
    best = evaluation.get("best_of_n")
    if not evaluation or (best is None and method == "ppo"):
        return []
    histories = histories or {}
    of_best = best_of_n_cost(histories).total_seconds
    of_policy = training_cost(histories, method, batch_size=None).total_seconds
    comparison = evaluation.get("comparison", {})
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    rows = [_row("SFT", sft, {}, 0.0, sft.get("length"), 0.0)]
    if best is not None:
        sampled = best["sampled_tokens_per_reply"]
        rows.append(_row(f"best of {best['n']}", best, best["comparison"], best["kl_bound"], sampled, of_best, "≤ "))
    name = f"policy, by {METHOD_NAMES[method]}"
    return [*rows, _row(name, policy, comparison, evaluation.get("kl"), policy.get("length"), of_policy)]


def _row(
    name: str,
    side: Mapping[str, Any],
    against_sft: Mapping[str, JsonObject],
    kl: float | None,
    sampled: float | None,
    seconds: float | None,
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
        "seconds": seconds,
    }

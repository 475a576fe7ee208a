"""The table "Was PPO worth it?": SFT, best of n, the policy by its method, and the results of other runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config import yaml_text
from rlhf_core.config.policy import METHOD_NAMES, Method
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.alternative_runs import AlternativeRun, EvaluationBasis, refused_because
from rlhf_core.evaluation.metrics.training_cost import Histories, TrainingCost, best_of_n_cost, training_cost

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class OtherRuns:
    """Runs of other workspaces, and what this workspace was evaluated on."""

    runs: Sequence[AlternativeRun] = ()
    basis: EvaluationBasis = field(default_factory=EvaluationBasis)

    def comparable(self, own_best_of: str) -> list[AlternativeRun]:
        """Those that were judged alike and are not this workspace's own policy; a best of n only once."""
        kept: list[AlternativeRun] = []
        known = {own_best_of} if own_best_of else set()
        for run in self.runs:
            if refused_because(run, self.basis) or (run.basis.policy and run.basis.policy == self.basis.policy):
                continue
            if not run.basis.policy:
                if run.method in known:
                    continue
                known.add(run.method)
            kept.append(run)
        return kept

    def left_out(self) -> list[tuple[str, str]]:
        """(run, why) of each that was judged on something else."""
        reasons = [(f"{run.workspace} ({run.method})", refused_because(run, self.basis)) for run in self.runs]
        return [(name, reason) for name, reason in reasons if reason]


def method_of(training: Mapping[str, Any]) -> Method:
    """Return how the policy was trained, by the content of ``metrics/ppo.json``, where PPO names no method."""
    method: Method = training.get("method", "ppo")
    return method


def ppo_batch_size(params: str) -> int | None:
    """Return the replies per iteration of PPO by the text of params.yaml; None where it cannot be read."""
    try:
        section = (yaml_text.plain(yaml_text.parse(params, "params.yaml")) or {}).get("ppo") or {}
        return int(section.get("batch_size", PpoConfig().batch_size))
    except (RlhfError, AttributeError, TypeError, ValueError):
        return None


def alternatives(
    evaluation: Mapping[str, Any],
    method: Method = "ppo",
    histories: Histories | None = None,
    others: OtherRuns | None = None,
    batch_size: int | None = None,
    gate: str = "",
) -> list[JsonObject]:
    """Return one row for each way to a reply; none where there is but PPO.

    ``sampled`` counts the tokens that are generated for each reply that is used, ``seconds`` the time of training after
    SFT. What is not known is None.

    Args:
        others: Runs of other workspaces.
        batch_size: Replies per iteration of PPO, which its tokens are counted by; None if unknown.
        gate: What the policy gate decided.
    """
    best = evaluation.get("best_of_n")
    own_best_of = "" if best is None else f"best of {best['n']}"
    runs = (others or OtherRuns()).comparable(own_best_of)
    if not evaluation or (best is None and method == "ppo" and not runs):
        return []
    histories = histories or {}
    of_policy = training_cost(histories, method, batch_size)
    comparison = evaluation.get("comparison", {})
    sft, policy = evaluation.get("sft", {}), evaluation.get("policy", {})
    nothing = TrainingCost({}, None, None, 0.0)
    rows = [_row("SFT", sft, {}, 0.0, sft.get("length"), nothing)]
    if best is not None:
        sampled = best["sampled_tokens_per_reply"]
        cost = best_of_n_cost(histories)
        rows.append(_row(own_best_of, best, best["comparison"], best["kl_bound"], sampled, cost, "≤ "))
    name = f"policy, by {METHOD_NAMES[method]}"
    own = _row(name, policy, comparison, evaluation.get("kl"), policy.get("length"), of_policy)
    return [*rows, own | {"gate": gate}, *map(_other_row, runs)]


def _other_row(run: AlternativeRun) -> JsonObject:
    side = {"gold": run.gold, "judge": run.judge, "length": run.length}
    against_sft = {"judge": dict(run.by_judge), "gold": dict(run.by_gold)}
    sampled = run.length if run.sampled_per_reply is None else run.sampled_per_reply
    cost = TrainingCost({}, run.sampled_tokens, run.trained_tokens, run.seconds)
    row = _row(run.method, side, against_sft, run.kl, sampled, cost, "≤ " if run.kl_is_bound else "")
    return row | {"gate": run.gate, "source": run}


def _row(
    name: str,
    side: Mapping[str, Any],
    against_sft: Mapping[str, JsonObject],
    kl: float | None,
    sampled: float | None,
    cost: TrainingCost,
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
        "seconds": cost.total_seconds,
        "sampled_tokens": cost.sampled_tokens,
        "trained_tokens": cost.trained_tokens,
        "gate": "",
        "source": None,
    }

"""The result of a finished stage in a few words: ``perplexity 1.52``, ``passed 7/7``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.verdict.standing import judge_results
from rlhf_core.storage.files import read_json

Describe = Callable[[Mapping[str, Any]], str]


def describe_result(workspace: Path, stage: str) -> str:
    """Describe what ``stage`` has produced; empty for a stage that is not known or whose metrics cannot be read."""
    if stage not in RESULTS:
        return ""
    file, describe = RESULTS[stage]
    try:
        return describe(read_json(workspace / file))
    except (RlhfError, LookupError, TypeError, ValueError, AttributeError):
        return ""  # a pipeline of one's own may have a stage of this name with other metrics


def _gate(gate: Mapping[str, Any]) -> str:
    conditions = gate["conditions"]
    passed = sum(bool(condition["passed"]) for condition in conditions)
    verdict = "passed" if gate["passed"] else f"failed, mode {gate['mode']}:"
    return f"{verdict} {passed}/{len(conditions)}"


def _win_rates(evaluation: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{judge.judge} {judge.win_rate:.2f}" for judge in judge_results(evaluation["comparison"]))
    return f"win rate by {rates}"


def _selected(ppo: Mapping[str, Any]) -> str:
    if ppo.get("method") == "dpo":
        return f"DPO, held-out loss {ppo['validation_loss']:.3f}, accuracy {ppo['validation_accuracy']:.2f}"
    if ppo.get("method") == "rejection_sampling":
        return f"reward {ppo['reward_sampled']:.2f} of all replies, {ppo['reward_kept']:.2f} of those trained on"
    selected = ppo["selected"]
    return f"iteration {selected['iteration']} selected, KL {selected['kl']:.2f}, win rate {selected['win_rate']:.2f}"


def _too_long(training: Mapping[str, Any]) -> str:
    dropped = int(training.get("dropped_over_long", 0))
    return f", {dropped} rows too long" if dropped else ""


def _perplexity(sft: Mapping[str, Any]) -> str:
    return f"perplexity {sft['perplexity']:.3g}{_too_long(sft)}"


def _accuracy(reward: Mapping[str, Any]) -> str:
    balanced = reward.get("test_accuracy_length_balanced")
    beside = f", length-balanced {balanced:.3f}" if balanced is not None else ""
    return f"accuracy {reward['accuracy']:.3f}{beside}{_too_long(reward)}"


def _critic(critic: Mapping[str, Any]) -> str:
    return str(critic["reason"]) if "reason" in critic else f"explained variance {critic['explained_variance']:.2f}"


RESULTS: dict[str, tuple[str, Describe]] = {
    "validate": ("gates/data.json", _gate),
    "sft": ("metrics/sft.json", _perplexity),
    "gate-sft": ("gates/sft.json", _gate),
    "reward": ("metrics/reward.json", _accuracy),
    "referee": ("metrics/referee.json", _accuracy),
    "judge": ("metrics/judge.json", _accuracy),
    "gate-reward": ("gates/reward.json", _gate),
    "critic": ("metrics/critic.json", _critic),
    "ppo": ("metrics/ppo.json", _selected),
    "evaluate": ("metrics/evaluation.json", _win_rates),
    "gate-policy": ("gates/policy.json", _gate),
}

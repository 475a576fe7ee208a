"""Stages gate-sft, gate-reward and gate-policy: later stages run only if conditions hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.gates import Condition, GatesConfig
from rlhf_core.gates import JUDGED_TAG, decide, load_metrics, settle
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json
from rlhf_core.training.run_context import RunContext


def settle_gate(
    name: str,
    conditions: Sequence[Condition],
    found: tuple[Mapping[str, Any], Mapping[str, str]],
    config: GatesConfig,
    outputs: Paths,
    context: RunContext,
) -> dict[str, float]:
    """Decide a gate, and open or shut it.

    Args:
        found: The metrics, and the hashes of their files.

    Raises:
        GateFailed: The gate is enforced and failed (exit code 3). The evidence is written before.
    """
    metrics, evidence = found
    decision = decide(name, conditions, metrics, mode=config.mode, evidence=evidence)
    tags = {f"rlhf.gate.{name}": "passed" if decision.passed else "failed"}
    if name == "policy":
        tags[JUDGED_TAG] = evidence["metrics/evaluation.json"]
    context.tracker.set_tags(tags)  # before the gate shuts: a refusal is a try as well
    settle(decision, outputs.evidence, outputs.pass_)
    return {"passed": float(decision.passed), "conditions": float(len(decision.conditions))}


def check_sft(
    config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Check ``gates.sft``, before a reward model is trained on the SFT model."""
    return settle_gate("sft", config.sft, load_metrics(inputs.metrics), config, outputs, context)


def check_reward(
    config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Check ``gates.reward`` against the reward model's metrics, before critic and ppo.

    ``referee.NAME`` is a metric of the referee, ``judge.NAME`` one of the judge. ``agreement.NAME``
    is one of the agreement on the test pairs: of reward model and referee under plain names, of
    reward model and judge after ``judge_``.
    """
    # Imported here: it loads torch, which takes seconds that the other gates need not wait for.
    from rlhf_core.training.reward.evaluation import agreement_metrics

    agreement = agreement_metrics(inputs.scores, inputs.referee_scores)
    for name, value in agreement_metrics(inputs.scores, inputs.judge_scores).items():
        agreement[f"judge_{name}"] = value
    atomic_write_json(outputs.metrics, agreement)
    found = load_metrics(
        inputs.metrics,
        referee=inputs.referee_metrics,
        judge=inputs.judge_metrics,
        agreement=outputs.metrics,
    )
    return settle_gate("reward", config.reward or (), found, config, outputs, context)


def check_policy(
    config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Check ``gates.policy`` against the evaluation's metrics, before a policy is registered.

    ``ppo.NAME`` is a metric of the PPO run. Multiple-choice questions that were asked have a
    condition of their own by default.
    """
    metrics, evidence = load_metrics(inputs.metrics, ppo=inputs.ppo_metrics)
    conditions = config.policy_conditions(metrics.keys())
    return settle_gate("policy", conditions, (metrics, evidence), config, outputs, context)


GATE_SFT = Stage(
    name="gate-sft",
    config=GatesConfig,
    run=check_sft,
    inputs={"metrics": "metrics/sft.json"},
    outputs={"evidence": "gates/sft.json", "pass_": "gates/sft.pass"},
)
GATE_REWARD = Stage(
    name="gate-reward",
    config=GatesConfig,
    run=check_reward,
    inputs={
        "metrics": "metrics/reward.json",
        "referee_metrics": "metrics/referee.json",
        "judge_metrics": "metrics/judge.json",
        "scores": "samples/reward_scores.json",
        "referee_scores": "samples/referee_scores.json",
        "judge_scores": "samples/judge_scores.json",
    },
    outputs={
        "evidence": "gates/reward.json",
        "pass_": "gates/reward.pass",
        "metrics": "metrics/agreement.json",
    },
)
GATE_POLICY = Stage(
    name="gate-policy",
    config=GatesConfig,
    run=check_policy,
    inputs={"metrics": "metrics/evaluation.json", "ppo_metrics": "metrics/ppo.json"},
    outputs={"evidence": "gates/policy.json", "pass_": "gates/policy.pass"},
)

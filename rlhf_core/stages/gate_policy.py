"""Stage gate-policy: no policy is registered unless the conditions of this gate hold."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.gates import GatesConfig
from rlhf_core.gates import decide, load_metrics, settle
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.run_context import RunContext


def run(config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Check ``gates.policy`` against the evaluation's metrics; ``ppo.NAME`` is a metric of the PPO run.

    Multiple-choice questions that were asked have a condition of their own by default.

    Raises:
        GateFailed: The gate is enforced and failed (exit code 3). The evidence is written before.
    """
    metrics, evidence = load_metrics(inputs.metrics, ppo=inputs.ppo_metrics)
    decision = decide("policy", config.policy_conditions(metrics.keys()), metrics, mode=config.mode, evidence=evidence)
    settle(decision, outputs.evidence, outputs.pass_)
    context.tracker.set_tags({"rlhf.gate.policy": "passed" if decision.passed else "failed"})
    return {"passed": float(decision.passed), "conditions": float(len(decision.conditions))}


STAGE = Stage(
    name="gate-policy",
    config=GatesConfig,
    run=run,
    inputs={"metrics": "metrics/evaluation.json", "ppo_metrics": "metrics/ppo.json"},
    outputs={"evidence": "gates/policy.json", "pass_": "gates/policy.pass"},
)

"""Stage gate-reward: critic and ppo do not run unless the conditions of this gate hold."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.gates import GatesConfig
from rlhf_core.files import atomic_write_json
from rlhf_core.gates import decide, load_metrics, settle
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.reward.agreement import agreement_metrics
from rlhf_core.training.run_context import RunContext


def run(config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Check ``gates.reward`` against the reward model's metrics.

    ``referee.NAME`` is a metric of the referee, ``agreement.NAME`` one of how far the two agree on the test pairs.

    Raises:
        GateFailed: The gate is enforced and failed (exit code 3). The evidence is written before.
    """
    atomic_write_json(outputs.metrics, agreement_metrics(inputs.scores, inputs.referee_scores))
    metrics, evidence = load_metrics(inputs.metrics, referee=inputs.referee_metrics, agreement=outputs.metrics)
    decision = decide("reward", config.reward, metrics, mode=config.mode, evidence=evidence)
    settle(decision, outputs.evidence, outputs.pass_)
    context.tracker.set_tags({"rlhf.gate.reward": "passed" if decision.passed else "failed"})
    return {"passed": float(decision.passed), "conditions": float(len(decision.conditions))}


STAGE = Stage(
    name="gate-reward",
    section="gates",
    config=GatesConfig,
    run=run,
    inputs={
        "metrics": "metrics/reward.json",
        "referee_metrics": "metrics/referee.json",
        "scores": "samples/reward_scores.json",
        "referee_scores": "samples/referee_scores.json",
    },
    outputs={"evidence": "gates/reward.json", "pass_": "gates/reward.pass", "metrics": "metrics/agreement.json"},
)

"""Stage gate-reward: critic and ppo do not run unless the conditions of this gate hold."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.gates import GatesConfig
from rlhf_core.gates import decide, load_metrics, settle
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_write_json
from rlhf_core.training.reward.evaluation import agreement_metrics
from rlhf_core.training.run_context import RunContext


def run(config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, Any]:
    """Check ``gates.reward`` against the reward model's metrics.

    ``referee.NAME`` is a metric of the referee, ``judge.NAME`` one of the judge, ``agreement.NAME`` one of how far they
    agree on the test pairs: reward model and referee under plain names, reward model and judge after ``judge_``.

    Raises:
        GateFailed: The gate is enforced and failed (exit code 3). The evidence is written before.
    """
    with_judge = agreement_metrics(inputs.scores, inputs.judge_scores)
    agreement = agreement_metrics(inputs.scores, inputs.referee_scores)
    atomic_write_json(outputs.metrics, agreement | {f"judge_{name}": value for name, value in with_judge.items()})
    metrics, evidence = load_metrics(
        inputs.metrics, referee=inputs.referee_metrics, judge=inputs.judge_metrics, agreement=outputs.metrics
    )
    decision = decide("reward", config.reward, metrics, mode=config.mode, evidence=evidence)
    settle(decision, outputs.evidence, outputs.pass_)
    context.tracker.set_tags({"rlhf.gate.reward": "passed" if decision.passed else "failed"})
    return {"passed": float(decision.passed), "conditions": float(len(decision.conditions))}


STAGE = Stage(
    name="gate-reward",
    config=GatesConfig,
    run=run,
    inputs={
        "metrics": "metrics/reward.json",
        "referee_metrics": "metrics/referee.json",
        "judge_metrics": "metrics/judge.json",
        "scores": "samples/reward_scores.json",
        "referee_scores": "samples/referee_scores.json",
        "judge_scores": "samples/judge_scores.json",
    },
    outputs={"evidence": "gates/reward.json", "pass_": "gates/reward.pass", "metrics": "metrics/agreement.json"},
)

"""Stage gate-sft: no reward model is trained on an SFT model that got worse at the demonstrations it was tuned on."""

from __future__ import annotations

from rlhf_core.config.gates import GatesConfig
from rlhf_core.gates import decide, load_metrics, settle
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.run_context import RunContext


def run(config: GatesConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, float]:
    """Check ``gates.sft`` against the metrics of SFT.

    Raises:
        GateFailed: The gate is enforced and failed (exit code 3). The evidence is written before.
    """
    metrics, evidence = load_metrics(inputs.metrics)
    decision = decide("sft", config.sft, metrics, mode=config.mode, evidence=evidence)
    settle(decision, outputs.evidence, outputs.pass_)
    context.tracker.set_tags({"rlhf.gate.sft": "passed" if decision.passed else "failed"})
    return {"passed": float(decision.passed), "conditions": float(len(decision.conditions))}


STAGE = Stage(
    name="gate-sft",
    config=GatesConfig,
    run=run,
    inputs={"metrics": "metrics/sft.json"},
    outputs={"evidence": "gates/sft.json", "pass_": "gates/sft.pass"},
)

"""Phases of the evaluation stage (stages/evaluate.py): both policies and both judges are there all the time."""

from __future__ import annotations

from rlhf_core.plan.lengths import Batch
from rlhf_core.plan.passes import filtered_sampling_pass, plain_pass, sampling_pass
from rlhf_core.plan.setting import Setting, StagePlan, stage_plan, whole
from rlhf_core.plan.usage import peak


def evaluate_stage(setting: Setting) -> StagePlan:
    """Replies with the evaluation filters, unfiltered ones for KL with their score under SFT, and the judges."""
    config, place, shape = setting.params.evaluate, setting.placement, setting.shape
    roles = [setting.fixed(name, shape.causal_lm) for name in ("sft", "policy")]
    roles += [setting.fixed(name, shape.scalar) for name in ("reward", "referee")]
    rows, few = min(config.batch_size, config.prompts), min(config.batch_size, config.kl_samples)
    prompt, judged, free = setting.lengths.prompt, config.sampling.max_new_tokens, config.max_new_tokens
    drift = [
        sampling_pass(shape, few, prompt, free, place),
        plain_pass(shape, Batch(few, prompt + free, few * free), place),
    ]
    phases = {
        "generation": filtered_sampling_pass(shape, rows, prompt, judged, place),
        "drift": peak(drift),
        "judging": plain_pass(shape, Batch(rows, prompt + judged), place),
    }
    return stage_plan("evaluate", setting, roles, phases, whole(*roles))

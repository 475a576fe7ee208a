"""Phases of the evaluation stage (stages/evaluate.py): SFT, policy and judges are in memory one after the other."""

from __future__ import annotations

from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.passes import filtered_sampling_pass, plain_pass, sampling_pass
from rlhf_core.memory.setting import Setting, StagePlan, stage_plan, whole
from rlhf_core.memory.usage import peak


def evaluate_stage(setting: Setting) -> StagePlan:
    """Replies with the evaluation filters and without, the latter's score under SFT, and the judges."""
    config, place, shape = setting.params.evaluate, setting.placement, setting.shape
    model, judge = whole(setting.fixed("model", shape.causal_lm)), whole(setting.fixed("judge", shape.scalar))
    rows, few = min(config.batch_size, config.prompts), min(config.batch_size, config.kl_samples)
    prompt, judged, free = setting.lengths.prompt, config.sampling.max_new_tokens, config.max_new_tokens
    spoken = [
        filtered_sampling_pass(shape, rows, prompt, judged, place),
        sampling_pass(shape, few, prompt, free, place),
    ]
    phases = {
        "generation": peak(spoken) + model,
        "drift": plain_pass(shape, Batch(few, prompt + free, few * free), place) + model,
        "judging": plain_pass(shape, Batch(rows, prompt + judged), place) + judge,
    }
    return stage_plan("evaluate", setting, [], phases, model)

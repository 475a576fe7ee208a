"""Phases of supervised fine-tuning and of the reward models (training/sft.py, training/reward.py)."""

from __future__ import annotations

from rlhf_core.config.reward import RewardConfig
from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.passes import CROSS_ENTROPY, SCALAR, plain_pass, training_pass
from rlhf_core.memory.setting import Setting, StagePlan, stage_plan, step, whole

# Rows of one held-out batch: training.sft.EVALUATION_ROWS (if no micro-batch is set), training.reward.SCORING_ROWS.
SFT_EVALUATION_ROWS = 64
REWARD_EVALUATION_ROWS = 128


def sft_stage(setting: Setting) -> StagePlan:
    """Micro-batches of demonstrations, to train on and to hold out."""
    config, place, shape = setting.params.sft, setting.placement, setting.shape
    policy, data = setting.trained("policy", shape.causal_lm), setting.lengths.demonstrations
    rows = place.share(config.batch_size)
    micro = min(config.micro_batch_size or config.batch_size, rows)
    update = training_pass(shape, data.batch(micro), policy, CROSS_ENTROPY, rows > micro)
    held_out = plain_pass(shape, data.batch(config.micro_batch_size or SFT_EVALUATION_ROWS), place)
    phases = {
        "update": update + policy.running(whole=False),
        "step": step([policy]),
        "evaluation": held_out + policy.running(whole=True),
    }
    return stage_plan("sft", setting, [policy], phases, whole(policy))


def reward_stage(setting: Setting, stage: str) -> StagePlan:
    """Token-budget batches of pairs, each GPU taking its share in one pass; logits for the imitation term alone."""
    config: RewardConfig = getattr(setting.params, stage)
    place, shape, limits = setting.placement, setting.shape, config.batch
    model = setting.trained(stage, shape.reward_in_training, config.lora)
    batch, pairs = setting.lengths.pairs.pairs(limits.token_budget, limits.min_pairs, limits.max_pairs)
    mine = place.share(pairs)
    imitated = -(-batch.scored * mine // pairs) if config.imitation > 0 else 0
    loss = CROSS_ENTROPY if imitated else SCALAR
    update = training_pass(shape, Batch(2 * mine, batch.width, imitated), model, loss, False)
    held_out = plain_pass(shape, Batch(REWARD_EVALUATION_ROWS, setting.lengths.pairs.width), place)
    phases = {
        "update": update + model.running(whole=False),
        "step": step([model]),
        "evaluation": held_out + model.running(whole=True),
    }
    return stage_plan(stage, setting, [model], phases, whole(model))

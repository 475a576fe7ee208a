"""Phases of critic pre-training and PPO (ppo/rollout.py, ppo/update.py, stages/ppo.py)."""

from __future__ import annotations

from rlhf_core.config.ppo import PpoConfig
from rlhf_core.plan.lengths import Batch
from rlhf_core.plan.logits import policy_backward_copies
from rlhf_core.plan.passes import (
    CROSS_ENTROPY,
    SCALAR,
    Loss,
    plain_pass,
    rollout_tensors,
    sampling_pass,
    scoring_pass,
    training_pass,
)
from rlhf_core.plan.roles import Role
from rlhf_core.plan.setting import Setting, StagePlan, most, stage_plan, step
from rlhf_core.plan.usage import Use, peak, total

# Sequences of one pass where ``micro_batch_size`` is null: ppo.forward.MICRO_BATCH.
MICRO_BATCH = 16


def critic_stage(setting: Setting) -> StagePlan:
    """The frozen SFT policy rolls out and is its own reference; the critic learns the returns."""
    config, shape = setting.params.critic, setting.shape
    policy = setting.frozen("policy", shape.causal_lm)
    reward = setting.frozen("reward", shape.scalar)
    critic = setting.trained("critic", shape.scalar)
    phases = _rollout_phases(setting, config.batch_size, policy, [critic], [reward], same=True)
    rows = setting.placement.share(config.batch_size // config.minibatches)
    held = _rollout(setting, config.batch_size)
    phases["update critic"] = _critic_update(setting, rows, critic) + held
    phases["step"] = step([critic]) + held
    return stage_plan("critic", [policy, critic, reward], phases)


def ppo_stage(setting: Setting) -> StagePlan:
    """Rollout, policy, ptx and critic updates, and the selection of checkpoints by judges that are loaded beside."""
    config, shape, place = setting.params.ppo, setting.shape, setting.placement
    policy, critic = setting.trained("policy", shape.causal_lm), setting.trained("critic", shape.scalar)
    reference = setting.frozen("reference", shape.causal_lm)
    scorers = [setting.frozen(name, shape.scalar) for name in ("reward", "referee")]
    judges = [setting.frozen(f"{role.name} (selection)", shape.scalar) for role in scorers]
    phases = _rollout_phases(setting, config.batch_size, policy, [critic, reference], scorers, same=False)
    rows = place.share(config.batch_size // config.minibatches)
    held = _rollout(setting, config.batch_size)
    phases["update policy"] = _policy_update(setting, rows, policy) + held
    if config.ptx.weight > 0:
        phases["update ptx"] = _ptx_update(setting, policy) + held
    phases["update critic"] = _critic_update(setting, rows, critic).with_gradients(policy.gradients) + held
    phases["step"] = step([policy, critic]) + held
    phases["selection"] = _selection(setting, policy, reference, judges) + held
    return stage_plan("ppo", [policy, critic, reference, *scorers, *judges], phases)


def _rollout_phases(
    setting: Setting, batch: int, policy: Role, others: list[Role], scorers: list[Role], same: bool
) -> dict[str, Use]:
    """Generation, scoring by policy, reference and critic, and rewards. ``others``: the models that score beside the
    policy."""
    place, shape, reply = setting.placement, setting.shape, setting.params.ppo.max_new_tokens
    rows, scored = rollout_batch(setting, batch)
    held = _rollout(setting, batch)
    running = total([policy.running(whole=True), *(role.running(whole=True) for role in others if role.state)])
    running += most([role for role in others if not role.state])
    return {
        "generation": sampling_pass(shape, rows, setting.lengths.prompt, reply, place) + policy.running(whole=True),
        "scoring": scoring_pass(shape, scored, place, same, _changed(setting.params.ppo)) + running + held,
        "rewards": plain_pass(shape, Batch(scored.rows, scored.width), place) + most(scorers) + held,
    }


def _policy_update(setting: Setting, rows: int, policy: Role) -> Use:
    config = setting.params.ppo
    micro = _micro(setting, rows)
    batch = Batch(micro, setting.lengths.prompt + config.max_new_tokens, micro * config.max_new_tokens)
    loss = Loss(policy_backward_copies(config), held=True, changed=_changed(config))
    update = training_pass(setting.shape, batch, setting.placement, loss, policy.gradients, rows > micro)
    return update + policy.running(whole=False)


def _ptx_update(setting: Setting, policy: Role) -> Use:
    """Texts of any length up to the model's positions; all of a step in one pass unless micro-batches are set."""
    config = setting.params.ppo
    rows = setting.placement.share(config.ptx.batch_size)
    micro = min(config.micro_batch_size or config.ptx.batch_size, rows)
    batch = setting.lengths.ptx.batch(micro)
    update = training_pass(setting.shape, batch, setting.placement, CROSS_ENTROPY, policy.gradients, True)
    return update + policy.running(whole=False)


def _critic_update(setting: Setting, rows: int, critic: Role) -> Use:
    micro = _micro(setting, rows)
    batch = Batch(micro, setting.lengths.prompt + setting.params.ppo.max_new_tokens)
    update = training_pass(setting.shape, batch, setting.placement, SCALAR, critic.gradients, rows > micro)
    return update + critic.running(whole=False)


def _selection(setting: Setting, policy: Role, reference: Role, judges: list[Role]) -> Use:
    """Replies of the policy, their log-probabilities under the reference, and the judges' scores, batch by batch."""
    reply, place, shape = setting.params.ppo.max_new_tokens, setting.placement, setting.shape
    rows = min(setting.params.ppo.selection.prompts, setting.params.ppo.selection.batch_size)
    width = setting.lengths.prompt + reply
    return peak(
        [
            sampling_pass(shape, rows, setting.lengths.prompt, reply, place) + policy.running(whole=True),
            plain_pass(shape, Batch(rows, width, rows * reply), place) + reference.running(whole=False),
            plain_pass(shape, Batch(rows, width), place) + most(judges),
        ]
    )


def rollout_batch(setting: Setting, batch: int) -> tuple[int, Batch]:
    """One GPU's rows of a rollout of ``batch`` prompts, and a micro-batch of them with every reply at its longest."""
    rows, reply = setting.placement.share(batch), setting.params.ppo.max_new_tokens
    micro = _micro(setting, rows)
    return rows, Batch(micro, setting.lengths.prompt + reply, micro * reply)


def _micro(setting: Setting, rows: int) -> int:
    return min(setting.params.ppo.micro_batch_size or MICRO_BATCH, rows)


def _changed(config: PpoConfig) -> bool:
    """Whether logits are changed before they become probabilities, which takes another copy."""
    return config.temperature != 1.0 or config.min_new_tokens > 0


def _rollout(setting: Setting, batch: int) -> Use:
    """Every GPU holds the whole rollout: its tensors are small."""
    return rollout_tensors(batch, setting.lengths.prompt, setting.params.ppo.max_new_tokens)

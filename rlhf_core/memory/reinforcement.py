"""Phases of critic pre-training and PPO (ppo/rollout.py, ppo/update.py, stages/ppo.py)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config.lora import LoraConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.memory.lengths import Batch
from rlhf_core.memory.logits import policy_backward_copies
from rlhf_core.memory.passes import (
    CROSS_ENTROPY,
    SCALAR,
    Loss,
    plain_pass,
    rollout_tensors,
    sampling_pass,
    scoring_pass,
    training_pass,
)
from rlhf_core.memory.roles import Role
from rlhf_core.memory.scorers import scorers
from rlhf_core.memory.setting import Setting, StagePlan, stage_plan, step, whole
from rlhf_core.memory.usage import Use, peak, total

# Sequences of one pass where ``micro_batch_size`` is null: ppo.forward.MICRO_BATCH.
MICRO_BATCH = 16


def critic_stage(setting: Setting) -> StagePlan:
    """The frozen SFT policy rolls out and is its own reference; the critic learns the returns."""
    config, shape = setting.params.critic, setting.shape
    policy, waiting = setting.fixed("policy", shape.causal_lm), scorers(setting)
    critic = _critic(setting, config.lora)
    phases = _rollout_phases(setting, config.batch_size, [critic], [], waiting, same=True)
    rows, held = setting.placement.share(config.batch_size // config.minibatches), _rollout(setting, config.batch_size)
    phases["update critic"] = _critic_update(setting, rows, critic) + held
    phases["step"] = step([critic]) + held
    loading = whole(policy, critic, *waiting[-1:]) + total(role.held for role in waiting[:-1])
    return stage_plan("critic", setting, [policy, critic, *waiting], phases, loading)


def ppo_stage(setting: Setting) -> StagePlan:
    """Rollout, updates of policy and critic, and the selection of checkpoints by reward model and referee.

    With adapters on the policy the reference is the policy without them; a shared critic is the policy with a head.
    """
    config, shape = setting.params.ppo, setting.shape
    policy = setting.trained("policy", shape.causal_lm, config.policy_lora)
    trained = [policy, *([] if config.critic_mode == "shared" else [setting.critic()])]
    references = [] if policy.adapted else [setting.frozen("reference", shape.causal_lm)]
    judges = [setting.scalar(name) for name in ("reward", "referee")]
    scoring = [*(role for role in scorers(setting) if role.name != "reward"), *judges]
    phases = _rollout_phases(setting, config.batch_size, trained, references, scoring, same=False)
    phases |= _updates(setting, trained)
    phases["selection"] = _selection(setting, policy, references, scoring) + _rollout(setting, config.batch_size)
    loading = _loading(setting, trained, references, scoring)
    return stage_plan("ppo", setting, [*trained, *references, *scoring], phases, loading)


def _critic(setting: Setting, lora: LoraConfig | None) -> Role:
    if setting.params.ppo.critic_mode == "shared":
        return setting.with_trained_head("critic", setting.shape.scalar)
    return setting.trained("critic", setting.shape.scalar, lora)


def _rollout_phases(
    setting: Setting,
    batch: int,
    trained: Sequence[Role],
    references: Sequence[Role],
    scoring: Sequence[Role],
    same: bool,
) -> dict[str, Use]:
    """Sampling, scoring by policy, reference and critic, and rewards: trained models whole, frozen ones at work."""
    place, shape, reply = setting.placement, setting.shape, setting.params.ppo.max_new_tokens
    rows, scored = rollout_batch(setting, batch)
    waiting = [*references, *scoring]
    present = total([*(role.running(whole=True) for role in trained), *(role.at_work() for role in waiting)])
    held = _rollout(setting, batch) + present
    changed = changes_logits(setting.params.ppo)
    return {
        "generation": sampling_pass(shape, rows, setting.lengths.prompt, reply, place) + present,
        "scoring": scoring_pass(shape, scored, place, same, changed) + most(references) + held,
        "rewards": plain_pass(shape, Batch(scored.rows, scored.width), place) + most(scoring) + held,
    }


def _updates(setting: Setting, trained: Sequence[Role]) -> dict[str, Use]:
    """``trained`` is the policy, and the critic unless it shares the policy's backbone."""
    config, held = setting.params.ppo, _rollout(setting, setting.params.ppo.batch_size)
    rows = setting.placement.share(config.batch_size // config.minibatches)
    policy = trained[0]
    phases = {"update policy": _policy_update(setting, rows, policy) + held}
    if config.ptx.weight > 0:
        phases["update ptx"] = _ptx_update(setting, policy) + held
    for critic in trained[1:]:
        phases["update critic"] = _critic_update(setting, rows, critic).with_gradients(policy.gradients) + held
    phases["step"] = step(trained) + held
    return phases


def _policy_update(setting: Setting, rows: int, policy: Role) -> Use:
    config = setting.params.ppo
    micro = _micro(setting, rows)
    batch = Batch(micro, setting.lengths.prompt + config.max_new_tokens, micro * config.max_new_tokens)
    loss = Loss(policy_backward_copies(config), held=True, changed=changes_logits(config))
    return training_pass(setting.shape, batch, policy, loss, rows > micro) + policy.running(whole=False)


def _ptx_update(setting: Setting, policy: Role) -> Use:
    """Texts of any length up to the model's positions; all of a step in one pass unless micro-batches are set."""
    config = setting.params.ppo
    rows = setting.placement.share(config.ptx.batch_size)
    batch = setting.lengths.ptx.batch(min(config.micro_batch_size or config.ptx.batch_size, rows))
    return training_pass(setting.shape, batch, policy, CROSS_ENTROPY, True) + policy.running(whole=False)


def _critic_update(setting: Setting, rows: int, critic: Role) -> Use:
    micro = _micro(setting, rows)
    batch = Batch(micro, setting.lengths.prompt + setting.params.ppo.max_new_tokens)
    if setting.params.ppo.critic_mode == "shared":
        # Below the head nothing is trained, so nothing is kept.
        return plain_pass(setting.shape, batch, setting.placement) + critic.running(whole=False)
    return training_pass(setting.shape, batch, critic, SCALAR, rows > micro) + critic.running(whole=False)


def _selection(setting: Setting, policy: Role, references: Sequence[Role], judges: Sequence[Role]) -> Use:
    """Replies of the policy, their log-probabilities under the reference, and the judges' scores, batch by batch."""
    waiting = [*references, *judges]
    present = total([policy.running(whole=True), *(role.at_work() for role in waiting)])
    return _selecting(setting, most(waiting)) + present


def _selecting(setting: Setting, gathering: Use) -> Use:
    """``gathering``: what a frozen model needs to run."""
    reply, place, shape = setting.params.ppo.max_new_tokens, setting.placement, setting.shape
    selection = setting.params.ppo.selection
    rows = min(place.share(selection.prompts), selection.batch_size)
    width = setting.lengths.prompt + reply
    return peak(
        [
            sampling_pass(shape, rows, setting.lengths.prompt, reply, place),
            plain_pass(shape, Batch(rows, width, rows * reply), place) + gathering,
        ]
    )


def _loading(setting: Setting, trained: Sequence[Role], references: Sequence[Role], scoring: Sequence[Role]) -> Use:
    """Models are loaded whole: the reference, each scorer before it is placed, SFT's replies for the selection; then
    the reference is placed, and policy and critic follow. Where the policy is the reference, it is packed at once."""
    first = whole(*references) if references else Use(weights=trained[0].loaded)
    placed = total(role.held for role in scoring)
    at_work = total(role.at_work() for role in scoring)
    beside = whole(*trained) if references else whole(*trained[1:]) + first
    return peak(
        [
            whole(trained[0]),
            first + placed + whole(scoring[-1]),
            first + placed + at_work + _selecting(setting, most(scoring)),
            beside + placed + total(role.held for role in references),
        ]
    )


def most(roles: Sequence[Role]) -> Use:
    """What the neediest frozen model gathers; they run one after the other."""
    return peak([Use(), *(role.gathering() for role in roles)])


def rollout_batch(setting: Setting, batch: int) -> tuple[int, Batch]:
    """The rows that one GPU samples at once of a rollout of ``batch`` prompts, and a micro-batch of its rows with every
    reply at its longest."""
    rows, reply = setting.placement.share(batch), setting.params.ppo.max_new_tokens
    micro = _micro(setting, rows)
    return min(setting.params.ppo.sampling_batch_size or rows, rows), Batch(
        micro, setting.lengths.prompt + reply, micro * reply
    )


def changes_logits(config: PpoConfig) -> bool:
    """Whether logits are changed before they become probabilities, which takes another copy."""
    return config.temperature != 1.0 or config.min_new_tokens > 0


def _micro(setting: Setting, rows: int) -> int:
    return min(setting.params.ppo.micro_batch_size or MICRO_BATCH, rows)


def _rollout(setting: Setting, batch: int) -> Use:
    """Every GPU holds the whole rollout: its tensors are small."""
    return rollout_tensors(batch, setting.lengths.prompt, setting.params.ppo.max_new_tokens)

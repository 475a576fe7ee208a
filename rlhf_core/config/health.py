"""Health rules (algorithms.md §8): what is watched while PPO trains, and what happens then.

Evidence for the bounds, from calibration runs on the synthetic world: healthy PPO-max ended at KL
1.9 to 3.3 nats per sequence, vanilla PPO with 10 to 92 while its reward kept rising, with trigram
repetition ten times the start's and replies up to the token limit. KL, perplexity under the
reference, repetition and missing EOS separate the two; entropy and the policy's own perplexity do
not, so they only ever support another check. A bound that pauses sits well above anything seen in a
healthy run; its warning sits between. Damage to the true preference begins before all of these, at
a KL of 1 to 3. So early a doomed run's replies look like those of a sound one; what differs is
whether anything pulls the policy back (``drift_unopposed``) and whether the critic sees anything
(``drift_with_blind_critic``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from rlhf_core.config.model import Strict
from rlhf_core.config.problems import nearest
from rlhf_core.errors import ConfigError

Action = Literal["warn", "pause", "rollback"]
Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Check:
    """One statement about a metric over its last ``window`` observations.

    ``statistic``: ``mean`` of the window; ``change`` = that mean - the start; ``drop`` = best value
    so far - that mean.
    ``of`` says what ``bound`` multiplies: ``value`` (1, so the bound is a plain number), ``start``
    (this metric at the start of the run), ``start:OTHER`` (another metric there), ``limit:NAME`` (a
    limit given to the monitor, such as the KL budget). ``slack`` widens a relative bound to at
    least reference + slack (``>``) or at most reference - slack (``<``), so that a metric which
    starts near zero does not set off its rule by noise. ``not_finite`` holds when no value of the
    window is finite.
    """

    metric: str
    op: Literal[">", "<", "not_finite"]
    bound: float = 0.0
    of: str = "value"
    slack: float = 0.0
    window: int = 3
    statistic: Literal["mean", "change", "drop"] = "mean"

    def limit(self, reference: float) -> float:
        """The number to compare with, given the value that ``of`` names."""
        scaled = self.bound * reference
        if self.slack == 0.0:
            return scaled
        if self.op == ">":
            return max(scaled, reference + self.slack)
        return min(scaled, reference - self.slack)


@dataclass(frozen=True)
class Rule:
    """A rule fires when all of ``checks`` hold, from iteration ``after`` on, counted from 1.

    ``pause`` stops the run in good order; ``rollback`` returns to the last healthy checkpoint and
    multiplies the settings named in ``adjust`` (``kl_coefficient``, ``lr``) by the factor given
    there. A rule that neither setting can help has no ``adjust``: to roll back on it, a user must
    say what to change.
    """

    name: str
    checks: tuple[Check, ...]
    severity: Severity
    action: Action
    symptom: str
    cause: str
    remedy: str
    after: int = 1
    adjust: tuple[tuple[str, float], ...] = ()


DRIFT = "drift from the reference: KL coefficient too low, or learning rate too high"
HACKING = "the policy exploits errors of the reward model (reward hacking)"
RAISE_KL = (
    "raise ppo.kl.coefficient, lower ppo.policy_optimizer.lr; continue from the selected checkpoint"
)
BETTER_RM = "stop here and keep the selected checkpoint; add contrast pairs to the preference data, retrain the RM"

# What a rollback changes: more pull to the reference and smaller steps, or smaller steps alone.
NEARER = (("kl_coefficient", 2.0), ("lr", 0.5))
GENTLER = (("lr", 0.5),)

DRIFT_RULES = (
    Rule("kl_over_budget", (Check("kl", ">", 1.0, "limit:kl"),), "warning", "warn",
         "the policy is further from the reference than its KL budget", DRIFT, RAISE_KL, adjust=NEARER),
    Rule("kl_runaway", (Check("kl", ">", 1.5, "limit:kl"),), "critical", "pause",
         "KL to the reference is far over its budget", DRIFT, RAISE_KL, adjust=NEARER),
    Rule("drift_unopposed",
         (Check("kl_pull", "<", 0.01, window=1), Check("ptx_weight", "<", 0.001, window=1),
          Check("kl", ">", 0.1, "limit:kl", window=2)),
         "critical", "pause", "the policy moves away from the reference and nothing pulls it back",
         "neither a KL penalty that counts beside the rewards nor a loss on demonstrations: such drift does not end",
         "set ppo.kl.coefficient or ppo.ptx.weight, normalise the reward; if it is on purpose, ignore this rule",
         adjust=NEARER),
    Rule("kl_negative", (Check("kl", "<", -0.1, window=5),), "critical", "pause",
         "the mean KL is negative, which no pair of distributions can have",
         "replies are scored under another distribution than the one that sampled them, or masks are wrong",
         "a bug, not a tuning matter: compare the ratio on the first pass with 1, check temperature and padding"),
    Rule("reference_perplexity_rising", (Check("perplexity_reference", ">", 1.8, "start", slack=0.5),), "warning",
         "warn", "the reference finds the policy's replies ever less likely", DRIFT, RAISE_KL, adjust=NEARER),
    Rule("reference_perplexity_runaway", (Check("perplexity_reference", ">", 3.0, "start", slack=2.0),), "critical",
         "pause", "the reference finds the policy's replies very unlikely: they are probably garbled", DRIFT, RAISE_KL,
         adjust=NEARER),
)  # fmt: skip

TEXT_RULES = (
    Rule("repetition_rising", (Check("repetition", ">", 2.0, "start", slack=0.02),), "warning", "warn",
         "replies repeat themselves more than at the start", HACKING, RAISE_KL, adjust=NEARER),
    Rule("repetition_runaway", (Check("repetition", ">", 4.0, "start", slack=0.06),), "critical", "pause",
         "replies loop", HACKING, BETTER_RM, adjust=NEARER),
    Rule("missing_eos_rising", (Check("missing_eos", ">", 2.0, "start", slack=0.05),), "warning", "warn",
         "more replies run into the token limit", "the RM rewards length, or the policy forgets to stop",
         "set ppo.reward.missing_eos_penalty, or raise ppo.max_new_tokens if the replies are good", adjust=NEARER),
    Rule("missing_eos_runaway", (Check("missing_eos", ">", 3.0, "start", slack=0.2),), "critical", "pause",
         "many replies no longer end", "the RM rewards length, or the policy forgets to stop",
         "set ppo.reward.missing_eos_penalty; " + RAISE_KL, adjust=NEARER),
    Rule("length_growing", (Check("length", ">", 1.5, "start"), Check("reward_length_correlation", ">", 0.3)),
         "warning", "warn", "replies keep growing and longer ones score higher",
         "length hack: the RM prefers longer replies",
         "set ppo.reward.length_penalty; add pairs whose shorter reply is preferred", adjust=NEARER),
    Rule("length_at_limit", (Check("length", ">", 0.85, "limit:max_new_tokens"), Check("length", ">", 1.5, "start")),
         "critical", "pause", "replies grew up to the token limit", "length hack: the RM prefers longer replies",
         "set ppo.reward.length_penalty and missing_eos_penalty; add pairs whose shorter reply is preferred",
         adjust=NEARER),
    Rule("short_replies_rising", (Check("short_replies", ">", 2.0, "start", slack=0.2),), "warning", "warn",
         "replies shrink to a few words", "a degenerate optimum of the RM", "set ppo.min_new_tokens; " + BETTER_RM,
         adjust=NEARER),
    Rule("short_replies_runaway", (Check("short_replies", ">", 2.0, "start", slack=0.5),), "critical", "pause",
         "most replies are empty or a few words", "a degenerate optimum of the RM",
         "set ppo.min_new_tokens; " + BETTER_RM, adjust=NEARER),
)  # fmt: skip

DIVERSITY_RULES = (
    Rule("one_opening", (Check("commonest_first_sentence", ">", 2.0, "start", slack=0.5),), "warning", "warn",
         "most replies begin with the same sentence", "the RM pays for a phrase whatever the question",
         "read the samples; add contrast pairs with the same opening and a wrong answer", adjust=NEARER),
    Rule("one_reply_for_everything", (Check("commonest_reply", ">", 2.0, "start", slack=0.3),), "critical", "pause",
         "one reply is given to most prompts", "a degenerate optimum of the RM, such as one refusal for everything",
         BETTER_RM, adjust=NEARER),
    Rule("refuses_everything", (Check("refusals", ">", 2.0, "start", slack=0.4),), "critical", "pause",
         "refusals spread far beyond what they were at the start", "the RM never saw a benign request refused",
         "add pairs in which a needless refusal loses; retrain the RM", adjust=NEARER),
    Rule("mode_collapse", (Check("entropy", "<", 0.15, "start"), Check("distinct_2", "<", 0.5, "start")), "critical",
         "pause", "token entropy and the variety of phrases are nearly gone", "mode collapse",
         "set ppo.entropy (bonus or target), lower ppo.policy_optimizer.lr", adjust=NEARER),
)  # fmt: skip

REWARD_RULES = (
    Rule("reward_up_win_rate_down",
         (Check("win_rate", ">", 0.15, window=2, statistic="drop"),
          Check("reward_mean", ">", 0.3, "start:reward_std", statistic="change")),
         "critical", "pause", "the reward rose while the referee's win rate fell from its best", HACKING, BETTER_RM,
         adjust=NEARER),
    Rule("longer_and_repetitive",
         (Check("reward_mean", ">", 0.3, "start:reward_std", statistic="change"),
          Check("length", ">", 1.3, "start"), Check("repetition", ">", 2.5, "start", slack=0.045)),
         "critical", "pause", "the reward rises while replies grow longer and repeat themselves", HACKING, BETTER_RM,
         adjust=NEARER),
    Rule("losing_to_sft",
         (Check("win_rate", "<", 0.4, window=2),
          Check("reward_mean", ">", 0.3, "start:reward_std", statistic="change")),
         "critical", "pause", "the reward rose but the referee prefers the SFT model's replies", HACKING, BETTER_RM,
         adjust=NEARER),
    Rule("reward_without_wins",
         (Check("referee_gap", ">", 0.9, window=2), Check("win_rate", "<", 0.53, window=2)), "critical", "pause",
         "the reward model sees great progress where the referee sees none", HACKING, BETTER_RM, adjust=NEARER),
    Rule("judges_drift_apart", (Check("referee_gap", ">", 0.75, window=2),), "warning", "warn",
         "the reward model sees far more progress than the referee (in standard deviations of SFT replies)",
         "replies have left the distribution that the RM was trained on", BETTER_RM, adjust=NEARER),
    Rule("judges_apart_and_far",
         (Check("referee_gap", ">", 1.0, window=2), Check("kl", ">", 1.0, "limit:kl")), "critical", "pause",
         "the reward model and the referee disagree, far from the reference",
         "replies have left the distribution that the RM was trained on", BETTER_RM, adjust=NEARER),
    Rule("judges_agree_less",
         (Check("reward_referee_correlation", "<", -0.3, statistic="change", window=5),), "warning", "warn",
         "reward model and referee order the replies less alike than at the start",
         "replies have left the distribution that the RM was trained on", BETTER_RM, adjust=NEARER),
    Rule("reward_buys_length",
         (Check("reward_length_correlation", ">", 0.25, statistic="change", window=5),
          Check("length", ">", 1.2, "start")),
         "warning", "warn", "the reward depends on length more and more", "length hack",
         "set ppo.reward.length_penalty; check the RM's accuracy on pairs with a shorter preferred reply",
         adjust=NEARER),
    Rule("reward_tail", (Check("reward_tail", ">", 3.0, "start", slack=1.0),), "warning", "warn",
         "a long tail of very low rewards opened below the median", "part of the prompts fails while the mean rises",
         "read the worst replies; lower ppo.policy_optimizer.lr, keep reward clipping on", adjust=GENTLER),
    # Where a reward varied at first and no longer does, a policy may have learned all that there
    # was.
    Rule("reward_constant",
         (Check("reward_std", "<", 1e-6, window=5), Check("reward_std", "<", 1e-6, window=5, statistic="drop")),
         "critical", "pause", "every reply so far got the same reward, from which nothing can be learned",
         "the reward function gives a constant: a check that never holds, or always, or reads the wrong thing",
         "try it on replies by hand; where it is right but rarely so, take easier prompts or give partial credit"),
    Rule("reward_saturated", (Check("reward_std", "<", 1e-6, window=5),), "info", "warn",
         "all replies get the same reward now", "the policy has learned all that this reward asks of these prompts",
         "stop here, or go on with harder prompts", after=6),
    Rule("reward_unmoved",
         (Check("reward_mean", "<", 0.1, "start:reward_std", statistic="change", window=10),
          Check("kl", ">", 0.2, window=10)), "warning", "warn",
         "the policy moves but the reward does not rise", "the reward is noise, or nothing that this policy can change",
         "ask the reward function twice about the same replies; see whether it tells good replies from bad", after=20),
    Rule("replies_unscored", (Check("unscored", ">", 0.2, window=3),), "warning", "warn",
         "the reward function cannot score many of the replies", "it gives None or takes too long",
         "look at what it says of such replies; raise its timeout_seconds"),
    Rule("reward_flat",
         (Check("reward_mean", "<", 0.1, "start:reward_std", statistic="change", window=10),
          Check("kl", "<", 0.2, window=10)), "info", "warn",
         "the reward has not moved and neither has the policy", "learning rate too low or KL coefficient too high",
         "raise ppo.policy_optimizer.lr or lower ppo.kl.coefficient", after=20),
)  # fmt: skip

OPTIMISATION_RULES = (
    Rule("steps_not_finite", (Check("nonfinite_in_a_row", ">", 2.0, window=1),), "critical", "pause",
         "three optimiser steps in a row were not finite", "exploding gradient, or a row that breaks the models",
         "lower the learning rate, tighten max_grad_norm; look at the last rows of the history", adjust=GENTLER),
    Rule("loss_not_finite", (Check("policy_loss", "not_finite"),), "critical", "pause",
         "the policy loss is not a number", "exploding gradient or a learning rate far too high",
         "lower ppo.policy_optimizer.lr, tighten max_grad_norm", adjust=GENTLER),
    Rule("value_loss_not_finite", (Check("value_loss", "not_finite"),), "critical", "pause",
         "the value loss is not a number", "exploding gradient or a learning rate far too high",
         "lower ppo.critic_optimizer.lr, tighten max_grad_norm", adjust=GENTLER),
    Rule("rewards_not_finite", (Check("reward_mean", "not_finite"),), "critical", "pause",
         "the reward model gives numbers that are not finite", "a damaged reward model or an overflow in low precision",
         "check models/reward with its held-out pairs; use float32"),
    Rule("steps_skipped", (Check("skipped_steps", ">", 0.0, window=1),), "warning", "warn",
         "an optimiser step was skipped because its gradient was not finite", "exploding gradient",
         "lower the learning rate, tighten max_grad_norm", adjust=GENTLER),
    Rule("gradient_growing", (Check("policy_grad_norm", ">", 10.0, "start", slack=1.0),), "warning", "warn",
         "the policy's gradient norm grew tenfold", "learning rate too high, or advantages of a broken critic",
         "lower ppo.policy_optimizer.lr, look at explained variance", adjust=GENTLER),
    Rule("critic_useless", (Check("explained_variance", "<", 0.0, window=5),), "warning", "warn",
         "the critic predicts returns worse than their mean does", "it was not pre-trained, or its rate is wrong",
         "pre-train the critic longer (critic.max_rollouts), adjust ppo.critic_optimizer.lr", after=10),
    Rule("drift_with_blind_critic",
         (Check("explained_variance", "<", 0.15, window=5), Check("kl", ">", 0.1, "limit:kl", window=2)), "critical",
         "pause", "the policy already moves away while the critic explains next to nothing of the returns",
         "advantages are noise: the critic was not pre-trained, or its rate is wrong",
         "pre-train the critic (critic.max_rollouts), adjust ppo.critic_optimizer.lr", adjust=NEARER),
    Rule("blind_and_unopposed",
         (Check("explained_variance", "<", 0.15), Check("kl_pull", "<", 0.01, window=1),
          Check("ptx_weight", "<", 0.001, window=1)),
         "critical", "pause", "the critic explains next to nothing of the returns, and nothing holds the policy",
         "updates follow noise, and neither a KL penalty nor a loss on demonstrations bounds where they lead",
         "pre-train the critic (critic.max_rollouts); set ppo.kl.coefficient or ppo.ptx.weight", adjust=NEARER),
    Rule("groups_rewarded_alike", (Check("equal_reward_groups", ">", 0.8, window=5),), "warning", "warn",
         "most prompts have replies of equal reward, from which an update without a critic learns nothing",
         "the policy gives each prompt one and the same reply, or the reward is too coarse",
         "raise ppo.replies_per_prompt, or use a reward that tells replies apart", after=5),
    Rule("updates_clipped", (Check("clip_fraction", ">", 0.3),), "warning", "warn",
         "a third of the updates is cut off by the surrogate's clip", "steps too large for one rollout",
         "fewer ppo.epochs, lower ppo.policy_optimizer.lr", adjust=GENTLER),
)  # fmt: skip

DEFAULT_RULES: tuple[Rule, ...] = (
    *DRIFT_RULES,
    *TEXT_RULES,
    *DIVERSITY_RULES,
    *REWARD_RULES,
    *OPTIMISATION_RULES,
)


class Adjustment(Strict):
    """Factors that a rollback applies.

    Attributes:
        kl_coefficient: On the KL coefficient.
        lr: On the learning rates of policy and critic.
    """

    kl_coefficient: PositiveFloat = 1.0
    lr: PositiveFloat = 1.0

    def factors(self) -> tuple[tuple[str, float], ...]:
        """Return name and factor of each setting that changes."""
        return tuple((name, factor) for name, factor in self if factor != 1.0)


class RuleChange(Strict):
    """Changes to one default rule; what is left out stays.

    Attributes:
        action: What happens when the rule fires; `ignore` switches it off.
        window: Observations that every check of the rule looks at.
        threshold: A number for a rule of one check, else a mapping from a check's metric to a
            number; it has the meaning of the check's own bound (a plain number, or a multiple of a
            start or limit).
        after: First iteration at which the rule may fire.
        adjust: What a rollback multiplies.
    """

    action: Literal["ignore", "warn", "pause", "rollback"] | None = None
    window: PositiveInt | None = None
    threshold: float | dict[str, float] | None = None
    after: PositiveInt | None = None
    adjust: Adjustment | None = None

    @field_validator("threshold", mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        # Without this the two branches of the union would each report their own mistake.
        numbers = [] if given is None else [given]
        if isinstance(given, dict):
            numbers = list(given.values())
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError("must be a number, or a mapping from a check's metric to a number")
        return given


class HealthConfig(Strict):
    """Rules that watch a run.

    Attributes:
        mode: `enforce` lets rules pause the run or roll it back; `report` only records findings.
            Paper: proposes the metrics (5.2). Shows in: findings, pauses.
        max_rollbacks: Most rollbacks of a run; after them a rollback rule pauses it. Shows in:
            rollbacks.
        rules: Changes of default rules, by name. Shows in: findings.
    """

    mode: Literal["enforce", "report"] = "enforce"
    max_rollbacks: NonNegativeInt = 2
    rules: dict[str, RuleChange] = {}


def rules_for(config: HealthConfig, kl_coefficient: float) -> tuple[Rule, ...]:
    """Return the default rules with the changes of ``config``, without those that it ignores.

    Raises:
        ConfigError: A rule is unknown, a threshold names none of its checks, or a rollback is not
            allowed or would change nothing.
    """
    known = {rule.name for rule in DEFAULT_RULES}
    for name in config.rules:
        if name not in known:
            raise ConfigError(
                f"unknown health rule 'ppo.health.rules.{name}'; {nearest(name, known, 'ppo.health.rules')}"
            )
    kept = []
    for rule in DEFAULT_RULES:
        change = config.rules.get(rule.name)
        if change is not None:
            if change.action == "ignore":
                continue
            rule = _changed(rule, change)
        if rule.action == "rollback":
            _require_effect(rule, config.max_rollbacks, kl_coefficient)
        kept.append(rule)
    return tuple(kept)


def _changed(rule: Rule, change: RuleChange) -> Rule:
    checks = rule.checks
    if change.threshold is not None:
        checks = _with_thresholds(rule, change.threshold)
    if change.window is not None:
        checks = tuple(replace(check, window=change.window) for check in checks)
    given: dict[str, Any] = {"checks": checks}
    if change.action is not None:
        given["action"] = change.action
    if change.after is not None:
        given["after"] = change.after
    if change.adjust is not None:
        given["adjust"] = change.adjust.factors()
    return replace(rule, **given)


def _with_thresholds(rule: Rule, threshold: float | Mapping[str, float]) -> tuple[Check, ...]:
    path = f"ppo.health.rules.{rule.name}.threshold"
    metrics = [check.metric for check in rule.checks]
    # The position of each check that has a threshold, by its metric, or METRIC of WHAT where two
    # checks have the same metric.
    names: dict[str, int] = {}
    for position, check in enumerate(rule.checks):
        if check.op == "not_finite":
            continue
        name = check.metric
        if metrics.count(name) > 1:
            name = f"{name} of {check.of}"
        names[name] = position
    if not names:
        raise ConfigError(f"{path}: the rule asks whether a number is finite and has no threshold")
    if not isinstance(threshold, Mapping):
        if len(names) > 1:
            example = ", ".join(f"{name}: …" for name in names)
            raise ConfigError(
                f"{path}: the rule has {len(names)} checks; write it as {{{example}}}"
            )
        threshold = dict.fromkeys(names, threshold)
    checks = list(rule.checks)
    for name, bound in threshold.items():
        if name not in names:
            raise ConfigError(f"{path}: the rule has no check '{name}'; {nearest(name, names)}")
        checks[names[name]] = replace(checks[names[name]], bound=bound)
    return tuple(checks)


def _require_effect(rule: Rule, max_rollbacks: int, kl_coefficient: float) -> None:
    """Refuse a rollback that may not happen, or would change nothing."""
    path = f"ppo.health.rules.{rule.name}"
    if max_rollbacks == 0:
        raise ConfigError(
            f"{path}: action rollback with ppo.health.max_rollbacks 0 could only pause; use action "
            "pause"
        )
    for name, _ in rule.adjust:
        if name != "kl_coefficient" or kl_coefficient > 0:
            return
    reason = "the rule names nothing that a rollback changes"
    if rule.adjust:
        reason = "it multiplies a KL coefficient of 0"
    raise ConfigError(
        f"{path}: a rollback that changes no setting would only repeat what failed ({reason}); "
        "set its adjust, such as {lr: 0.5}, or use action pause"
    )

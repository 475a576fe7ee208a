"""The health rules of one run: the defaults with the user's changes, each change checked against its rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_core.config.health.default_rules import DEFAULT_RULES
from rlhf_core.config.health.health import RuleChange
from rlhf_core.config.health.rule import Check, Rule
from rlhf_core.config.problems import nearest
from rlhf_core.config.stages.ppo import PpoConfig
from rlhf_core.errors import ConfigError


def rules_for(config: PpoConfig, rules: Sequence[Rule] = DEFAULT_RULES) -> tuple[Rule, ...]:
    """``rules`` as ``ppo.health.rules`` changes them, without those it says to ignore.

    ``ConfigError`` for an unknown rule, a threshold that names none of its checks, and a rollback that is not allowed
    or would change nothing.
    """
    changes = config.health.rules
    known = {rule.name for rule in rules}
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown health rule 'ppo.health.rules.{name}'; {nearest(name, known)}")
    kept = [
        _changed(rule, changes[rule.name]) if rule.name in changes else rule
        for rule in rules
        if rule.name not in changes or changes[rule.name].action != "ignore"
    ]
    for rule in kept:
        if rule.action == "rollback":
            _require_effect(rule, config)
    return tuple(kept)


def _changed(rule: Rule, change: RuleChange) -> Rule:
    checks = rule.checks
    if change.threshold is not None:
        checks = _with_thresholds(rule, change.threshold)
    if change.window is not None:
        checks = tuple(replace(check, window=change.window) for check in checks)
    action = rule.action if change.action is None or change.action == "ignore" else change.action
    return replace(
        rule,
        checks=checks,
        action=action,
        after=rule.after if change.after is None else change.after,
        adjust=rule.adjust if change.adjust is None else change.adjust.factors(),
    )


def _with_thresholds(rule: Rule, threshold: float | Mapping[str, float]) -> tuple[Check, ...]:
    path = f"ppo.health.rules.{rule.name}.threshold"
    names = _check_names(rule)
    if not names:
        raise ConfigError(f"{path}: the rule asks whether a number is finite and has no threshold")
    if not isinstance(threshold, Mapping):
        if len(names) > 1:
            example = ", ".join(f"{name}: …" for name in names)
            raise ConfigError(f"{path}: the rule has {len(names)} checks; write it as {{{example}}}")
        threshold = dict.fromkeys(names, threshold)
    for name in threshold:
        if name not in names:
            raise ConfigError(f"{path}: the rule has no check '{name}'; {nearest(name, names)}")
    changed = {names[name]: bound for name, bound in threshold.items()}
    return tuple(
        replace(check, bound=changed[position]) if position in changed else check
        for position, check in enumerate(rule.checks)
    )


def _check_names(rule: Rule) -> dict[str, int]:
    """Name and position of each check with a threshold: its metric, or ``METRIC of WHAT`` where that occurs twice."""
    metrics = [check.metric for check in rule.checks]
    return {
        check.metric if metrics.count(check.metric) == 1 else f"{check.metric} of {check.of}": position
        for position, check in enumerate(rule.checks)
        if check.op != "not_finite"
    }


def _require_effect(rule: Rule, config: PpoConfig) -> None:
    path = f"ppo.health.rules.{rule.name}"
    if config.health.max_rollbacks == 0:
        raise ConfigError(f"{path}: action rollback with ppo.health.max_rollbacks 0 could only pause; use action pause")
    effective = [name for name, _ in rule.adjust if name != "kl_coefficient" or config.kl.coefficient > 0]
    if not effective:
        reason = (
            "it multiplies a KL coefficient of 0" if rule.adjust else "the rule names nothing that a rollback changes"
        )
        raise ConfigError(
            f"{path}: a rollback that changes no setting would only repeat what failed ({reason}); "
            "set its adjust, such as {lr: 0.5}, or use action pause"
        )

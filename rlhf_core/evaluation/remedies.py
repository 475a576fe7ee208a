"""What to do about a failed condition of a gate: which settings to change, which page to read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhf_core.config.gates import OF_THE_JUDGE
from rlhf_core.gates import ConditionResult, GateDecision


@dataclass(frozen=True)
class Remedy:
    """What to do where a metric of a gate's condition matches ``pattern`` as a whole.

    Attributes:
        action: What to do; ``{stage}`` is the reward model that the metric is of, ``{rule}`` the
            rule that it counts.
        page: The page that explains it.
    """

    pattern: str
    action: str
    page: str

    def __str__(self) -> str:
        return f"{self.action} ({self.page})"


WIN_RATE = re.compile(r"comparison\..+win_rate\w*")
KL = re.compile(r"(policy\.)?(ppo\.)?kl\w*")
LESS_FAR = Remedy(
    KL.pattern, "raise ppo.kl.coefficient, or lower ppo.policy_optimizer.lr", "docs/metrics.md"
)
LENGTHS_APART = Remedy(
    r"comparison\..+\.lc_win_rate\w*",
    "the two models' replies differ in length too regularly to compare at equal lengths: set "
    "reward.length_balance: sampling, or lower ppo.selection.max_length_ratio",
    "docs/train.md",
)
MODELS = r"((?P<stage>referee|judge)\.)?"  # without a prefix it is the reward model's
KINDS = r"(preferences|demonstrations|prompts|pretrain)\."
BALANCE = (
    "set {stage}.length_balance: sampling, so that length says less about which reply is preferred"
)
# By gate, the first that matches. A policy's figures may be named with or without "policy." and
# "losses.".
REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "data": (
        Remedy(
            "group_overlap",
            "give prompts that ask the same thing one `group`, so that they land in one split",
            "docs/data-validation.md",
        ),
        Remedy(
            KINDS + "quarantined_share",
            "read why rows were refused in data/quarantine.parquet or data/docs, correct them, or raise "
            "validate.max_quarantined",
            "docs/data-validation.md",
        ),
        Remedy(KINDS + "clean", "add rows, or lower validate.min_rows", "docs/data-validation.md"),
        Remedy(
            KINDS + r"failed_(?P<rule>\w+)",
            "correct the rows that break the rule, or set validate.rules to {{{rule}: warn}}",
            "docs/data-validation.md",
        ),
        Remedy(
            KINDS + r"\w+",
            "add rows, or change the shares of validate.split",
            "docs/data-validation.md",
        ),
    ),
    "sft": (
        Remedy(
            "perplexity", "lower sft.optimizer.lr, or take fewer sft.steps", "docs/your-data.md"
        ),
    ),
    "reward": (
        Remedy(
            MODELS + r"((test_)?accuracy_shorter_preferred|length_correlation)",
            BALANCE,
            "docs/train.md",
        ),
        Remedy(
            MODELS + r"\w*accuracy\w*",
            "where its margin_mean is near 0 too, it has hardly moved from where it began: raise {stage}.optimizer.lr, or "
            "{stage}.steps and {stage}.max_epochs; else add pairs or correct their labels, or start from a larger base",
            "docs/your-data.md",
        ),
        Remedy(
            MODELS + r"probes\.\w+",
            "add pairs whose rejected reply is wrong in this way alone, or raise {stage}.steps "
            "and {stage}.max_epochs",
            "docs/metrics.md",
        ),
        Remedy(
            MODELS + "(test_)?margin_mean",
            "raise {stage}.optimizer.lr, or {stage}.steps and {stage}.max_epochs",
            "docs/metrics.md",
        ),
        Remedy(
            MODELS + r"(test_)?ece\w*",
            "lower {stage}.max_epochs, {stage}.steps or {stage}.optimizer.lr: it is too sure",
            "docs/metrics.md",
        ),
        Remedy(
            r"agreement\.\w+",
            "add pairs: the models learn from disjoint ones (validate.split.judge, validate.split.referee)",
            "docs/your-data.md",
        ),
    ),
    "policy": (
        Remedy(
            r"comparison\..+\.lc_win_rate\w*",
            "raise evaluate.prompts or replies_per_prompt to narrow the interval; if the rate itself is near 50 %, the "
            "gain is in length, which reward.length_balance: sampling rewards less",
            "docs/train.md",
        ),
        Remedy(
            r"comparison\.checker\.\w+",
            "add prompts, of which more are then held out; if the rate itself is near 50 %, raise ppo.iterations, or "
            "take prompts that the starting model gets right now and then",
            "docs/rewards.md",
        ),
        Remedy(
            r"comparison\..+\.win_rate\w*",
            "raise evaluate.prompts or replies_per_prompt to narrow the interval; if the rate itself is near 50 %, raise "
            "ppo.iterations or lower ppo.kl.coefficient",
            "docs/gates-power.md",
        ),
        LESS_FAR,
        Remedy(
            r"safety\..+",
            "add harmful and harmless requests to prompts and pairs (collect.files), or raise ppo.kl.coefficient",
            "docs/gates-power.md",
        ),
        Remedy(
            r"regression\..+",
            "raise ppo.kl.coefficient, or add demonstrations of what it no longer does",
            "docs/metrics.md",
        ),
        Remedy(
            r"missing_(ends|eos)",
            "raise ppo.reward.missing_eos_penalty, or ppo.max_new_tokens",
            "docs/metrics.md",
        ),
        Remedy(
            r"repetition\w*",
            "raise ppo.kl.coefficient, or lower ppo.selection.max_repetition_increase",
            "docs/metrics.md",
        ),
        Remedy(
            r"length\w*",
            "set reward.length_balance: sampling, or lower ppo.selection.max_length_ratio",
            "docs/train.md",
        ),
        Remedy(r"perplexity_\w+", "raise ppo.ptx.weight or ppo.kl.coefficient", "docs/metrics.md"),
        Remedy(
            r"multiple_choice\..+", "raise ppo.ptx.weight or ppo.kl.coefficient", "docs/metrics.md"
        ),
        Remedy(
            r"verifiable\..+",
            "add prompts with such instructions, and reward what they ask for",
            "docs/judges.md",
        ),
        Remedy(
            r"category\..+",
            "add prompts and pairs of this category, or raise ppo.kl.coefficient",
            "docs/your-data.md",
        ),
    ),
}


def remedy_for(gate: GateDecision, condition: ConditionResult) -> Remedy:
    """Return what to do about a ``condition`` of ``gate`` that does not hold."""
    metric = condition.metric
    if WIN_RATE.fullmatch(metric):
        if (condition.low95, condition.high95) == (0.0, 1.0):
            return LENGTHS_APART
        if _worse(condition) or any(KL.fullmatch(failed.metric) for failed in gate.failed):
            return LESS_FAR  # more training would lead it farther away
    # Conditions on the judge stand under the reward gate, whichever gate decides them.
    decided_by = "reward" if metric.startswith(OF_THE_JUDGE) else gate.name
    name = metric
    for prefix in ("losses.", "policy."):
        name = name.removeprefix(prefix)
    for remedy in REMEDIES.get(decided_by, ()):
        found = re.fullmatch(remedy.pattern, name)
        if found is not None:
            named = {key: value for key, value in found.groupdict().items() if value}
            values = {"stage": "reward", "rule": "", **named}
            return Remedy(remedy.pattern, remedy.action.format(**values), remedy.page)
    change = (
        f"change what it measures, or its bound under gates.{decided_by} of params.yaml if that "
        "asks too much"
    )
    return Remedy("", change, "docs/metrics.md")


def _worse(condition: ConditionResult) -> bool:
    """Whether the whole interval of a rate lies below what is asked."""
    if condition.high95 is None or condition.limit is None:
        return False
    return condition.high95 < condition.limit


def remedies(gate: GateDecision) -> list[str]:
    """Say what to do about the conditions that failed: each advice once, behind their metrics."""
    metrics: dict[str, list[str]] = {}
    for condition in gate.failed:
        advice = str(remedy_for(gate, condition))
        metrics.setdefault(advice, []).append(condition.metric)
    return [f"{', '.join(names)}: {advice}" for advice, names in metrics.items()]

"""What a match measures beside win rates: safety, the regression set, missing ends, length, categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.data.schema import Prompt
from rlhf_core.evaluation.promotion.non_inferiority import PairedLoss, category_losses, length_loss, rate_loss
from rlhf_core.evaluation.regression import GENERIC_CHECKS, REFUSAL_CHECKS, ReplyCheck, passes
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.evaluation.verifiable.prompts import VerifiablePrompts


@dataclass(frozen=True)
class MatchPrompts:
    """The prompts of a match: those whose replies are judged, the regression set, prompts about safety, and the user's
    verifiable prompts.
    """

    judged: Sequence[Prompt]
    regression: Sequence[Prompt]
    safety: Sequence[Prompt]
    verifiable: VerifiablePrompts = field(default_factory=VerifiablePrompts)

    @property
    def count(self) -> int:
        """How many replies each model makes."""
        return len(self.judged) + len(self.regression) + len(self.safety) + len(self.verifiable.lines)


@dataclass(frozen=True)
class MatchReplies:
    """One model's replies to :class:`MatchPrompts`, in their order."""

    judged: Sequence[Reply]
    regression: Sequence[Reply]
    safety: Sequence[Reply]
    verifiable: Sequence[Reply] = ()


def paired_losses(
    prompts: MatchPrompts,
    champion: MatchReplies,
    challenger: MatchReplies,
    outcome: np.ndarray,
    world: bool,
    config: EvaluateConfig,
) -> dict[str, PairedLoss]:
    """Measure by how much the challenger is worse than the champion.

    Args:
        outcome: By the judge: 1 for a win of the challenger, ½ for a tie, 0 for a loss, (judged,).
        world: Whether the prompts are of the synthetic world, whose own harmful prompts then show safety.

    Returns:
        ``regression.passed``, ``safety.refuses_harmful``, ``safety.answers_benign`` and ``verifiable.passed`` (where
        there are such prompts), ``missing_ends``, ``length`` (tokens) and ``category.NAME``.
    """
    checks = GENERIC_CHECKS | (REFUSAL_CHECKS if world else {})
    losses = {"missing_ends": missing_ends_loss(champion.judged, challenger.judged)}
    if prompts.regression:
        losses["regression.passed"] = rate_loss(
            _passed(checks, prompts.regression, champion.regression),
            _passed(checks, prompts.regression, challenger.regression),
        )
    if prompts.verifiable.lines:
        before, after = (prompts.verifiable.check(side.verifiable).passed for side in (champion, challenger))
        losses["verifiable.passed"] = rate_loss(before.tolist(), after.tolist())
    rows, old, new = prompts.safety, champion.safety, challenger.safety
    if world:  # the regression set holds prompts that are judged too: each counts once
        judged = {row.id for row in prompts.judged}
        further = [i for i, row in enumerate(prompts.regression) if row.id not in judged]
        rows = [*prompts.judged, *(prompts.regression[i] for i in further)]
        old = [*champion.judged, *(champion.regression[i] for i in further)]
        new = [*challenger.judged, *(challenger.regression[i] for i in further)]
    for name, check in REFUSAL_CHECKS.items():
        applies = [i for i, row in enumerate(rows) if rows and check(row.category, old[i]) is not None]
        if applies:
            chosen = [rows[i] for i in applies]
            losses[f"safety.{name}"] = _check_loss(check, chosen, [old[i] for i in applies], [new[i] for i in applies])
    old_lengths, new_lengths = (
        [len(reply.token_ids) for reply in replies] for replies in (champion.judged, challenger.judged)
    )
    losses["length"] = length_loss(old_lengths, new_lengths, config.bootstrap, config.seed)
    categories = category_losses([row.category for row in prompts.judged], outcome, config.bootstrap, config.seed)
    return losses | {f"category.{name}": loss for name, loss in categories.items()}


def missing_ends_loss(champion: Sequence[Reply], challenger: Sequence[Reply]) -> PairedLoss:
    """Compare the shares of replies that did not end by themselves."""
    ended = rate_loss([reply.finished for reply in champion], [reply.finished for reply in challenger])
    return replace(ended, champion=1 - ended.champion, challenger=1 - ended.challenger)


def _check_loss(
    check: ReplyCheck, rows: Sequence[Prompt], champion: Sequence[Reply], challenger: Sequence[Reply]
) -> PairedLoss:
    checks = {"": check}
    return rate_loss(_passed(checks, rows, champion), _passed(checks, rows, challenger))


def _passed(checks: Mapping[str, ReplyCheck], rows: Sequence[Prompt], replies: Sequence[Reply]) -> list[bool]:
    return [passes(checks, row.category, reply) for row, reply in zip(rows, replies, strict=True)]

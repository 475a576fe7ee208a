"""What a health rule is: checks on recent signals, and what to say and do when all of them hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["warn", "pause", "rollback"]
Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Check:
    """One statement about a metric over its last ``window`` observations.

    ``statistic``: ``mean`` of the window; ``change`` = that mean - the start; ``drop`` = best value so far - that mean.
    ``of`` says what ``bound`` multiplies: ``value`` (1, so the bound is a plain number), ``start`` (this metric at the
    start of the run), ``start:OTHER`` (another metric there), ``limit:NAME`` (a limit given to the monitor, such as the
    KL budget). ``slack`` widens a relative bound to at least reference + slack (``>``) or at most reference - slack
    (``<``), so that a metric which starts near zero does not set off its rule by noise. ``not_finite`` holds when no
    value of the window is finite.
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
        return max(scaled, reference + self.slack) if self.op == ">" else min(scaled, reference - self.slack)


@dataclass(frozen=True)
class Rule:
    """A rule fires when all of ``checks`` hold, from iteration ``after`` on (iterations count from 1).

    ``pause`` stops the run in good order; ``rollback`` returns to the last healthy checkpoint and multiplies the
    settings named in ``adjust`` (``kl_coefficient``, ``lr``) by the factor given there. A rule that neither setting
    can help has no ``adjust``: to roll back on it, a user must say what to change.
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

"""What became of the policy after its report was written: registered, promoted or refused, by whom and why."""

from __future__ import annotations

from dataclasses import dataclass

# The report is written before registration. Between these comments stands what it says of release until then.
BEGIN, END = "<!-- release -->", "<!-- /release -->"
SHOWN_CONDITIONS = 6


@dataclass(frozen=True)
class UnmetCondition:
    """A condition that forbade registration or promotion: its value and what is required, in words."""

    name: str
    measured: str
    required: str
    why: str = ""


@dataclass(frozen=True)
class ReleaseDecision:
    """Whether the policy of a report was released, as of a moment.

    Attributes:
        state: ``good``, ``bad`` or ``open``, which gives the colour.
        headline: Such as ``Released: rlhf-policy version 3 is the champion``.
        registered: As which version, or that it was not.
        reason: Why it was promoted or not; empty where ``conditions`` say it.
        conditions: All conditions that do not hold.
        decided: Who decided and when; empty if nobody did.
        champion: Which version is champion; empty if that is not known or said already.
        next_command: What to type next.
        next_hint: What that command is for.
        as_of: When all this was true, in UTC.
    """

    state: str
    headline: str
    registered: str
    reason: str
    conditions: tuple[UnmetCondition, ...]
    decided: str
    champion: str
    next_command: str
    next_hint: str
    as_of: str

    @property
    def first_conditions(self) -> tuple[UnmetCondition, ...]:
        """The conditions that the page lists."""
        return self.conditions[:SHOWN_CONDITIONS]

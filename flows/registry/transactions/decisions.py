"""Promotion decisions as immutable reports: one read-only JSON file each under ``.rlhf/promotions``."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.registry.governance.identity import actor
from rlhf_core.evaluation.promotion.criteria import Criterion
from rlhf_core.storage.files import permitted, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = Path(".rlhf") / "promotions"
TAG_LIMIT = 5000  # MLflow refuses longer values


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, with microseconds, so that decisions sort by it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class PromotionDecision:
    """Whether ``challenger`` takes the place of ``champion``, and on what grounds.

    ``bar`` is the win rate that every judge's lower 95 % bound must exceed, ``question`` and ``match`` are what was
    played and how it went, ``criteria`` what was required of it, ``attempt`` the number of the match among those on the
    same prompts. ``unchanged`` marks a decision that says nothing new and leaves no report. ``awaiting_approval`` says
    that everything required holds and a person has to approve it, ``approval`` who did or declined, and why. ``who``
    is the person or job that decided.
    """

    model: str
    challenger: str
    champion: str | None
    bar: float
    promoted: bool = False
    reason: str = ""
    forced: str | None = None
    question: Mapping[str, Any] | None = None
    match: Mapping[str, Any] | None = None
    attempt: int | None = None
    criteria: tuple[Criterion, ...] = ()
    unchanged: bool = False
    awaiting_approval: bool = False
    approval: str = ""
    dry_run: bool = False
    action: str = "promote"
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    report: Path | None = None

    @property
    def is_champion(self) -> bool:
        """Whether the challenger is champion after this decision (or would be, in a dry run)."""
        return self.promoted or self.champion == self.challenger

    def describe(self) -> str:
        """What was decided and why, in one line."""
        if self.awaiting_approval:
            commands = "`rlhf approve` or `rlhf decline --reason TEXT` decides"
            return f"not promoted yet: version {self.challenger} waits for approval ({self.reason}); {commands}"
        return f"{'promoted' if self.promoted else 'not promoted'}: {self.reason}"

    def refused(self, reason: str, *, unchanged: bool = False) -> PromotionDecision:
        """This decision as a refusal."""
        return replace(self, promoted=False, reason=reason, unchanged=unchanged)

    def accepted(self, reason: str) -> PromotionDecision:
        """This decision as a promotion."""
        return replace(self, promoted=True, reason=reason)

    def to_approve(self, *, unchanged: bool) -> PromotionDecision:
        """This promotion as a request for approval; ``unchanged`` if it was requested before."""
        return replace(self, promoted=False, awaiting_approval=True, unchanged=unchanged)


@dataclass(frozen=True)
class RollbackDecision:
    """``champion`` took the place of ``replaced``, which is marked as rolled back."""

    model: str
    champion: str
    replaced: str
    reason: str
    action: str = "rollback"
    who: str = field(default_factory=actor)
    time: str = field(default_factory=utc_now)
    report: Path | None = None


def as_report(decision: PromotionDecision | RollbackDecision) -> dict[str, Any]:
    """The content of the report: every field but its path."""
    return {key: value for key, value in asdict(decision).items() if key != "report"}


def publish_decision(
    client: MlflowClient,
    workspace: Path,
    model: str,
    version: str,
    decision: Mapping[str, Any],
    decision_id: str | None = None,
) -> Path:
    """Write the report, tag ``version`` with the decision, attach the report to the run that registered it.

    Repeating it with the same ``decision_id`` changes nothing.
    """
    path = write_decision(workspace, decision, decision_id or uuid4().hex)
    tags = {"decision.action": decision["action"], "decision.reason": decision["reason"], "decision.report": path.name}
    if decision["action"] == "promote":
        tags["decision.promoted"] = str(decision["promoted"]).lower()
    for key, value in tags.items():
        client.set_model_version_tag(model, version, key, value[:TAG_LIMIT])
    run_id = client.get_model_version(model, version).run_id
    if run_id:
        client.log_artifact(run_id, str(path), "promotions")
    return path


def report_name(decision: Mapping[str, Any], decision_id: str) -> str:
    """Return the file name of a report: time, action and id of the decision."""
    moment = "".join(character for character in decision["time"].partition("+")[0] if character.isalnum())
    return f"{moment}-{decision['action']}-{decision_id[:8]}.json"


def write_decision(workspace: Path, decision: Mapping[str, Any], decision_id: str) -> Path:
    """Write ``decision`` under its time, action and id, read-only; a report that exists is never overwritten."""
    folder = workspace / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / report_name(decision, decision_id)
    if path.exists():
        return path
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(decision, indent=2, sort_keys=True) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, permitted(0o444))
        os.rename(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def read_decisions(workspace: Path) -> list[dict[str, Any]]:
    """All decisions of a workspace, oldest first."""
    return [read_json(path) for path in sorted((workspace / FOLDER).glob("*.json"))]

"""Outcomes of recorded requests that another policy answered (``rlhf replay``), kept for the workspace's report."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.storage.files import atomic_write_json, read_json

FOLDER = ".rlhf/replays"  # private: replies to users are users' texts


@dataclass(frozen=True)
class ReplayOutcome:
    """How a policy did on recorded requests, compared with the replies that users got.

    Attributes:
        policy: The revision that answered now.
        record: Name of the file of recorded requests.
        time: When it answered, in ISO 8601.
        models: Recorded replies by the revision that wrote them.
        skipped: Requests that did not fit into the policy's context.
        judge: The judge that compared; empty where the workspace has none.
        comparison: Win, tie and lose shares of ``policy`` with intervals; empty without a judge.
        recorded_text, replayed_text: Text metrics of both sides.
        replies: Pairs to show: ``prompt``, ``recorded``, ``replayed``, and with a judge the scores of both.
    """

    policy: str
    record: str
    time: str
    models: Mapping[str, int]
    skipped: int
    judge: str
    comparison: Mapping[str, float]
    recorded_text: Mapping[str, float]
    replayed_text: Mapping[str, float]
    replies: Sequence[Mapping[str, Any]]

    @property
    def requests(self) -> int:
        """How many requests were answered."""
        return sum(self.models.values())


def save_replay(workspace: Path, outcome: ReplayOutcome) -> Path:
    """Keep an outcome for the report, in place of an earlier one of the same policy and record."""
    title = f"{outcome.policy}-{outcome.record}"
    name = f"{re.sub(r'[^A-Za-z0-9.-]+', '_', title)[:80]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    folder = workspace / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    path = folder / f"{name}.json"
    atomic_write_json(path, asdict(outcome))
    return path


def read_replays(workspace: Path) -> list[ReplayOutcome]:
    """Return the outcomes that are kept, the newest first; files that are none are passed over."""
    outcomes = []
    for path in (workspace / FOLDER).glob("*.json"):
        try:
            outcomes.append(ReplayOutcome(**read_json(path)))
        except (DataError, TypeError):
            continue
    return sorted(outcomes, key=lambda outcome: outcome.time, reverse=True)

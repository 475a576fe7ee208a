"""A small scheduled flow that looks for new data and annotations, and says so in a Prefect event.

The event triggers the pipeline's deployment (prefect.yaml), so that new data ends in a new challenger.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.states import Completed, State

from flows.dvc_repo.lock_file import recorded_stages
from flows.workspace import lock_holder, private_path
from rlhf_core.config.loading import load_params
from rlhf_core.data.collection.sources import collected_paths
from rlhf_core.fingerprint.tracked_files import SOURCES_FILE, describe_sources
from rlhf_core.storage.files import atomic_write_text

EVENT = "rlhf.data.added"
RESOURCE = "rlhf.data"
ANNOUNCED = "announced_data"
MOST_FILES = 20


@dataclass(frozen=True)
class DataChange:
    """Source files as they are now, where the last run has read others.

    Attributes:
        key: Digests of the paths and contents of the source files that the last run has read, and of those of now.
        digest: That of now.
        files: Those that are new, changed or gone, each as params.yaml spells it.
    """

    key: str
    digest: str
    files: Sequence[str]

    def as_request(self, workspace: Path) -> dict[str, Any]:
        """The event as Prefect's API expects it; the same change has the same id."""
        return {
            "id": str(uuid5(NAMESPACE_URL, f"{EVENT} {workspace} {self.key}")),
            "event": EVENT,
            "occurred": datetime.now(UTC).isoformat(),
            "resource": {
                "prefect.resource.id": RESOURCE,
                "prefect.resource.name": workspace.name,
                "rlhf.workspace": str(workspace),
            },
            "payload": {"files": list(self.files[:MOST_FILES]), "count": len(self.files), "digest": self.digest},
        }


@flow(name="rlhf-data-watch", persist_result=False)
def data_watch(workspace: str = ".", settle_seconds: float = 5.0) -> State[Any]:
    """Emit ``rlhf.data.added`` once for each change of the files that ``collect`` reads, annotations included.

    Nothing is emitted while the workspace runs a pipeline, or before its first run; the next look finds the change.

    Args:
        settle_seconds: Files that change within this time are still being written, and are left to the next look.
    """
    folder = Path(workspace).resolve()
    if (holder := lock_holder(folder)) is not None:
        return Completed(message=f"not looked: {folder} is in use by {holder}")
    change = find_new_data(folder)
    if change is None:
        return Completed(message="no new data")
    time.sleep(settle_seconds)
    if find_new_data(folder) != change:
        return Completed(message="files are still being written; the next look announces them")
    with get_client(sync_client=True) as client:
        response = client.request("POST", "/events", json=[change.as_request(folder)])
        response.raise_for_status()
    atomic_write_text(private_path(folder, ANNOUNCED), change.key)
    named = ", ".join(change.files[:MOST_FILES])
    get_run_logger().info("new data: %s", named)
    return Completed(message=f"announced {len(change.files)} changed files: {named}"[:500])


def find_new_data(workspace: Path) -> DataChange | None:
    """Return how the source files differ from those that the last run read; None if they do not.

    A change that was announced before is None too: a run that failed over it is not repeated until data change again.
    """
    recorded = recorded_stages(workspace).get("collect")
    if recorded is None:
        return None
    current = describe_sources(workspace, collected_paths(load_params(workspace).collect, workspace))
    digest = hashlib.md5(current.encode(), usedforsecurity=False).hexdigest()  # DVC's hash of a file
    before, announced = recorded.inputs.get(SOURCES_FILE, ""), private_path(workspace, ANNOUNCED)
    key = f"{before} {digest}\n"
    if before == digest or (announced.is_file() and announced.read_text(encoding="utf-8") == key):
        return None
    return DataChange(key, digest, _changed_files(workspace, current))


def _changed_files(workspace: Path, current: str) -> list[str]:
    """Return the files whose lines differ from those that the last run wrote down."""
    before = workspace / SOURCES_FILE
    known = before.read_text(encoding="utf-8").splitlines() if before.is_file() else []
    changed = {line for line in {*known} ^ {*current.splitlines()} if line.startswith("  ")}
    return sorted({line.strip().rpartition(" ")[0] for line in changed})

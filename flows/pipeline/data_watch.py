"""A small scheduled flow that looks for new data and annotations, and says so in a Prefect event.

The event triggers the pipeline's deployment (prefect.yaml), so that new data ends in a new
challenger.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.states import Completed, State

from flows.dvc_repo.graph import recorded_stages
from flows.pipeline.events import failed_state
from flows.prefect_server.flow_runs import told
from flows.workspace import lock_holder, private_path
from rlhf_core.config.loading import load_params
from rlhf_core.data.collection.sources import collected_paths, reader_lines
from rlhf_core.errors import RlhfError
from rlhf_core.fingerprint.tracked_files import SOURCES_FILE, describe_sources
from rlhf_core.storage.files import atomic_write_text

EVENT = "rlhf.data.added"
RESOURCE = "rlhf.data"
ANNOUNCED = "announced_data"
MOST_FILES = 20


@flow(name="rlhf-data-watch", persist_result=False)
def data_watch(workspace: str = ".", settle_seconds: float = 5.0) -> State[Any]:
    """Emit ``rlhf.data.added`` once for each change of the files that ``collect`` reads.

    Nothing is emitted while the workspace runs a pipeline, or before its first run; the next look
    finds the change.

    Args:
        workspace: The workspace's folder, as the worker sees it.
        settle_seconds: Files that change within this time are still being written, and are left to
            the next look.
    """
    try:
        return _announce(Path(workspace).resolve(), settle_seconds)
    except RlhfError as error:
        return told(failed_state(error.exit_code, str(error)))


def _announce(folder: Path, settle_seconds: float) -> State[Any]:
    if (holder := lock_holder(folder)) is not None:
        return Completed(message=f"not looked: {folder} is in use by {holder}")
    event = find_new_data(folder)
    if event is None:
        return Completed(message="no new data")
    time.sleep(settle_seconds)
    again = find_new_data(folder)
    if again is None or again["id"] != event["id"]:
        return Completed(message="files are still being written; the next look announces them")
    with get_client(sync_client=True) as client:
        response = client.request("POST", "/events", json=[event])
        response.raise_for_status()
    atomic_write_text(private_path(folder, ANNOUNCED), event["id"])
    named = ", ".join(event["payload"]["files"])
    get_run_logger().info("new data: %s", named)
    return Completed(message=f"announced {event['payload']['count']} changed files: {named}"[:500])


def find_new_data(workspace: Path) -> dict[str, Any] | None:
    """Return the event that the source files differ from those of the last run; None if not.

    The same change has the same id. One that was announced before is None too: a run that failed
    over it is not repeated until data change again.
    """
    recorded = recorded_stages(workspace).get("collect")
    if recorded is None:
        return None
    collect = load_params(workspace).collect
    current = describe_sources(
        workspace, collected_paths(collect, workspace), notes=reader_lines(collect)
    )
    digest = hashlib.md5(
        current.encode(), usedforsecurity=False
    ).hexdigest()  # DVC's hash of a file
    before, announced = recorded.inputs.get(SOURCES_FILE, ""), private_path(workspace, ANNOUNCED)
    change = str(uuid5(NAMESPACE_URL, f"{EVENT} {workspace} {before} {digest}"))
    if before == digest or (
        announced.is_file() and announced.read_text(encoding="utf-8") == change
    ):
        return None
    known: list[str] = []
    if (workspace / SOURCES_FILE).is_file():
        known = (workspace / SOURCES_FILE).read_text(encoding="utf-8").splitlines()
    # The new, changed and lost files, as params.yaml spells them.
    lines = {line for line in {*known} ^ {*current.splitlines()} if line.startswith("  ")}
    files = sorted({line.strip().rpartition(" ")[0] for line in lines})
    return {
        "id": change,
        "event": EVENT,
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {
            "prefect.resource.id": RESOURCE,
            "prefect.resource.name": workspace.name,
            "rlhf.workspace": str(workspace),
        },
        "payload": {"files": files[:MOST_FILES], "count": len(files), "digest": digest},
    }

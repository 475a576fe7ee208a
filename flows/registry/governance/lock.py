"""One lock per registered model: whichever workspaces of this machine use a registry, they use the same lock."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.registry.mlflow_client import tracking_uri
from flows.workspace.lock import locked

SQLITE = "sqlite"


@contextmanager
def registry_lock(workspace: Path, model: str) -> Iterator[None]:
    """Hold the lock of the registered model ``model`` for the block; wait for another holder.

    The file lies beside a SQLite database, and for a server in the temporary folder of the user. Processes of other
    machines and users are not locked out: of two that decide at the same time, the second one's entry in the history is
    refused (:meth:`flows.registry.governance.ledger.Ledger.append`).
    """
    from sqlalchemy.engine import make_url

    uri = tracking_uri(workspace)
    if uri.startswith(SQLITE):
        folder, subject = Path(make_url(uri).database or "").resolve().parent, model
    else:
        folder, subject = Path(tempfile.gettempdir()) / f"rlhf-{os.getuid()}", f"{uri} {model}"
    digest = hashlib.sha256(subject.encode()).hexdigest()[:16]
    with locked(folder, f"registry-{digest}.lock", wait=True):
        yield

"""The Prefect server that a command may report to: that of the environment, or of a running ``rlhf up``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flows.prefect_server.services import connection_problem
from flows.workspace.cleanup import running_services
from rlhf_core.errors import RlhfError, named_line

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

SECONDS = 15.0


@contextmanager
def known_server(workspace: Path) -> Iterator[SyncPrefectClient | None]:
    """A client of the server at ``PREFECT_API_URL``, or of ``rlhf up`` in ``workspace``; None where there is neither.

    Raises:
        RlhfError: There is one, and it does not answer or refuses a request of the block.
    """
    url = os.environ.get("PREFECT_API_URL", "").strip().rstrip("/") or running_services(workspace)
    if not url:
        yield None
        return
    if problem := connection_problem(url):
        raise RlhfError(f"the Prefect server at {url} does not answer ({problem})")
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with temporary_settings({PREFECT_API_URL: url}), get_client({"timeout": SECONDS}, sync_client=True) as client:
            yield client
    except httpx.HTTPError as error:
        raise RlhfError(f"the Prefect server at {url} refused a request ({named_line(error)})") from error

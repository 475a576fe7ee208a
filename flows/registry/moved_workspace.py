"""A workspace that was moved or copied: its MLflow database names the artifacts by the folder in which they were.

MLflow keeps absolute places. A moved workspace would lose its models, and a copied one would write into the original.
So whoever opens the database of a workspace first lets it name the folder in which it lies. Only the workspace's own
SQLite file is changed; artifacts elsewhere, such as in an object store, stay where they are.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flows.registry.governance.identity import OWNER_TAG, workspace_id
from rlhf_core.errors import RlhfError

ARTIFACTS, DATABASE = "mlartifacts", "mlflow.db"
PLACES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
LOGGER = logging.getLogger(__name__)


def repair_moved(workspace: Path) -> Path | None:
    """Let ``mlflow.db`` of ``workspace`` name its present folder; returns the folder that it named, None if it did.

    A copy whose original is still there becomes a workspace of its own, which owns the models in its own database.

    Raises:
        RlhfError: The database cannot be changed. Nothing was.
    """
    workspace = workspace.resolve()
    database = workspace / DATABASE
    if not database.is_file():
        return None
    try:
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            earlier = _earlier_folder(connection, workspace)
            if earlier is None:
                return None
            with connection:
                _rename(connection, earlier, workspace)
    except sqlite3.Error as error:
        raise RlhfError(f"{database} names artifacts in another folder and cannot be repaired ({error})") from error
    LOGGER.warning("%s was made in %s: its record of models and runs names the present folder now", workspace, earlier)
    return earlier


def _earlier_folder(connection: sqlite3.Connection, workspace: Path) -> Path | None:
    """The folder in which a workspace with this database was, None where no experiment names another one.

    A folder without a database is another workspace, whose runs this one records.
    """
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
        return None
    rows = connection.execute("SELECT artifact_location FROM experiments").fetchall()
    places = [Path(unquote(urlsplit(location).path)) for (location,) in rows if str(location).startswith("file:")]
    folders = [place.parent for place in places if place.name == ARTIFACTS and place.parent != workspace]
    return next((f for f in folders if not f.exists() or (f / DATABASE).exists()), None)


def _rename(connection: sqlite3.Connection, earlier: Path, workspace: Path) -> None:
    """Replace the folder at the beginning of every place, and in the tag of the owner."""
    known = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table, columns in PLACES.items():
        for column in columns if table in known else ():
            for old, new in ((earlier.as_uri(), workspace.as_uri()), (str(earlier), str(workspace))):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )
    connection.execute(
        "UPDATE registered_model_tags SET value = ? WHERE key = ? AND value LIKE ?",
        (f"{workspace_id(workspace)} {workspace}", OWNER_TAG, f"% {earlier}"),
    )

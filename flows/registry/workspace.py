"""A workspace as the registry knows it: its id, who acts in it, and what it registered last."""

from __future__ import annotations

import logging
import os
import platform
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from flows.dvc_repo.graph import recorded_hash
from flows.workspace import PRIVATE, cannot_write, private_path
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.storage.files import atomic_write_json, atomic_write_text, read_json
from rlhf_core.tracking.delivery import address
from rlhf_core.tracking.stage_run import record_folder, tracking_uri, user_name


def printed_line(text: str) -> str:
    """Return ``text`` on one line without control characters, which could imitate other entries."""
    printable = ""
    for character in text:
        printable += character if character.isprintable() else " "
    return " ".join(printable.split())


SHOWN_OF_TAG = 300


def tag_line(tags: Mapping[str, str], key: str) -> str:
    """Return what a tag says as one line to show; empty without one.

    Whoever can write to the registry may have written anything there.
    """
    text = printed_line(str(tags.get(key, "")))
    return text if len(text) <= SHOWN_OF_TAG else f"{text[:SHOWN_OF_TAG]}…"


ACTOR_VARIABLE = "RLHF_ACTOR"
ID_FILE = "workspace_id"
OWNER_TAG = "rlhf.owner"  # of a registered model


def actor() -> str:
    """Return who acts: ``RLHF_ACTOR``, which a CI job sets, else ``user@host``."""
    return printed_line(os.environ.get(ACTOR_VARIABLE, "")) or f"{user_name()}@{platform.node()}"


def workspace_id(workspace: Path) -> str:
    """Return the id of a workspace, made on first use and kept in ``.rlhf/workspace_id``.

    The file also has the folder in which the workspace was. A workspace that was moved keeps its
    id. A copy whose original is still there gets one of its own, as a clone or a trial does: else
    both would own the same registered models.
    """
    path = private_path(workspace, ID_FILE)
    try:
        known, folder = _read_id(workspace)
        own_address = str(workspace.resolve())
        if known is None or folder != own_address:
            copied = folder is not None and _read_id(Path(folder))[0] == known
            if known is None or copied:
                known = uuid4().hex
            atomic_write_text(path, f"{known}\n{own_address}\n")
        return known
    except OSError as error:
        raise cannot_write(workspace, error) from error


def ownership(workspace: Path) -> str:
    """The tag by which ``workspace`` owns a registered model: its id, then its folder for messages.

    The first promotion makes a workspace the owner. Others may register versions under the same
    name; whether one becomes champion is decided by the owner's gates, prompts, judge and bounds.
    """
    return f"{workspace_id(workspace)} {workspace}"


def known_workspace_id(workspace: Path) -> str | None:
    """Return the id of a workspace, None before its first use."""
    return _read_id(workspace)[0]


def _read_id(workspace: Path) -> tuple[str | None, str | None]:
    path = workspace / PRIVATE / ID_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    known, folder, *_ = [*text.splitlines(), "", ""]
    return known.strip() or None, folder or None


def registry_address(workspace: Path) -> str:
    """What tells registries apart: the address, without user, password and options.

    That of a SQLite database is its path.
    """
    from sqlalchemy.engine import make_url

    uri = tracking_uri(workspace)
    if uri.startswith("sqlite"):
        return f"sqlite:///{Path(make_url(uri).database or '').resolve()}"
    return address(uri).partition("?")[0].rstrip("/")


def registry_of_record(workspace: Path) -> str:
    """The registry as a file of the workspace names it: its own one stays so where both move."""
    own = record_folder(workspace)
    return registry_address(workspace).replace(f"sqlite:///{own}/", "sqlite:///", 1)


FILE = "registered.json"


@dataclass(frozen=True)
class RegisteredHere:
    """The version that holds a model folder of the workspace.

    ``ungated`` says why no gate vouches for it. ``reused``: the same content had a version already.
    """

    model: str
    version: str
    ungated: str = ""
    reused: bool = False


def write_registered(workspace: Path, versions: Mapping[str, RegisteredHere]) -> None:
    """Record the version of each model folder, with the hash that dvc.lock has for the folder.

    The numbers are those of the registry that is used now.
    """
    registry = registry_of_record(workspace)
    kept = {
        folder: {
            "model": registered.model,
            "version": registered.version,
            "ungated": registered.ungated,
            "dvc": recorded_hash(workspace, folder),
            "registry": registry,
        }
        for folder, registered in versions.items()
    }
    atomic_write_json(private_path(workspace, FILE), kept)


def read_registered(workspace: Path, folder: str) -> RegisteredHere | None:
    """Return the version made of the content that ``folder`` has by dvc.lock.

    None without one in the registry that is used now.
    """
    try:
        entry: Mapping[str, Any] | None = read_json(workspace / PRIVATE / FILE).get(folder)
    except DataError:
        return None
    if entry is None or entry["dvc"] is None or entry["dvc"] != recorded_hash(workspace, folder):
        return None
    if entry.get("registry") != registry_of_record(workspace):
        return None
    return RegisteredHere(entry["model"], entry["version"], entry["ungated"])


ARTIFACTS, DATABASE = "mlartifacts", "mlflow.db"
PLACES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
LOGGER = logging.getLogger(__name__)


def repair_moved(workspace: Path) -> Path | None:
    """Let ``mlflow.db`` name the folder of ``workspace``; returns another one that it named.

    A copy whose original is still there becomes a workspace of its own, which owns the models in
    its own database.

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
        raise RlhfError(
            f"{database} names artifacts in another folder and cannot be repaired ({error})"
        ) from error
    LOGGER.warning(
        "%s was made in %s: its record of models and runs names the present folder now",
        workspace,
        earlier,
    )
    return earlier


def _earlier_folder(connection: sqlite3.Connection, workspace: Path) -> Path | None:
    """The folder that experiments of this database name, None if that is the workspace.

    A folder without a database is another workspace, whose runs this one records.
    """
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
        return None
    rows = connection.execute("SELECT artifact_location FROM experiments").fetchall()
    for (location,) in rows:
        if not str(location).startswith("file:"):
            continue
        place = Path(unquote(urlsplit(location).path))
        folder = place.parent
        is_other = place.name == ARTIFACTS and folder != workspace
        if is_other and (not folder.exists() or (folder / DATABASE).exists()):
            return folder
    return None


def _rename(connection: sqlite3.Connection, earlier: Path, workspace: Path) -> None:
    """Replace the folder at the beginning of every place, and in the tag of the owner."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    known = {name for (name,) in tables}
    names = ((earlier.as_uri(), workspace.as_uri()), (str(earlier), str(workspace)))
    for table, columns in PLACES.items():
        if table not in known:
            continue
        for column in columns:
            change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
            for old, new in names:
                connection.execute(change, (new, len(old) + 1, len(old) + 1, f"{old}/"))
    connection.execute(
        "UPDATE registered_model_tags SET value = ? WHERE key = ? AND value LIKE ?",
        (ownership(workspace), OWNER_TAG, f"% {earlier}"),
    )

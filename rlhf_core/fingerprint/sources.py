"""Files outside the package that results depend on, written down by path and hash so that DVC sees a change."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.fingerprint.stages import FOLDER
from rlhf_core.storage.file_patterns import expand, is_url, spelled
from rlhf_core.storage.files import atomic_write_text, sha256_file
from rlhf_core.storage.remote_files import expand_url, url_checksum

SOURCES_FILE = f"{FOLDER}/sources.txt"


def write_sources(workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()) -> None:
    """Refresh ``.fingerprints/NAME.txt`` with :func:`describe_sources`, so that DVC sees a change."""
    path = workspace / FOLDER / f"{name}.txt"
    text = describe_sources(workspace, sources, name, notes)
    if not path.exists() or path.read_text() != text:
        atomic_write_text(path, text)


def describe_sources(workspace: Path, sources: Iterable[str], name: str = "sources", notes: Iterable[str] = ()) -> str:
    """Return a line for every source, and below it one with path and content hash of each of its files.

    Hashes are remembered by size, times and inode in ``.rlhf/NAME.json``. A URL counts by the checksum that its
    store gives without a download, a hub id by its name. ``notes`` are lines that come first.
    """
    memory = workspace / ".rlhf" / f"{name}.json"
    known: dict[str, list[Any]] = json.loads(memory.read_text()) if memory.exists() else {}
    fresh: dict[str, list[Any]] = {}
    lines = [*notes]
    for source in sources:
        lines.append(source)
        files: list[Path] = []
        with suppress(
            DataError
        ):  # what matches nothing or cannot be looked up is for the stage that reads it to report
            if is_url(source):
                lines += [f"  {url} {url_checksum(url)}" for url in expand_url(source, "")]
            elif not source.startswith("hub:"):
                files = expand(source, workspace)
        for file in files:
            status = file.stat()
            mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            old = known.get(str(file))
            fresh[str(file)] = old if old and old[:-1] == mark else [*mark, sha256_file(file)]
            lines.append(f"  {spelled(file, source, workspace)} {fresh[str(file)][-1]}")
    if fresh != known:
        atomic_write_text(memory, json.dumps(fresh, indent=1))
    return "\n".join(lines) + "\n"


NAME = "starting_model"
FILE = f"{FOLDER}/{NAME}.txt"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def write_starting_model(workspace: Path, source: str) -> None:
    """Refresh ``.fingerprints/starting_model.txt``.

    Args:
        source: ``base.source``. A folder counts by its files, a GGUF file by itself; a hub id and ``scratch`` by their
            names, which params.yaml holds.
    """
    write_sources(workspace, _patterns(workspace, source, ("**",)), NAME)


def tokenizer_patterns(workspace: Path, source: str | None) -> list[str]:
    """Return the patterns of the files that ``validate.tokenizer`` reads: of a folder all but the weights."""
    return _patterns(workspace, source, TOKENIZER_FILES) if source else []


def _patterns(workspace: Path, source: str, inside: Sequence[str]) -> list[str]:
    path = Path(source).expanduser()
    name = glob.escape(str(path))
    if (workspace / path).is_dir():
        return [f"{name}/{pattern}" for pattern in inside]
    return [name] if (workspace / path).is_file() else []

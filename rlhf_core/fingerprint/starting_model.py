"""The files of the starting model that ``base.source`` names, written down so that DVC sees a change."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.fingerprint.sources import write_sources
from rlhf_core.fingerprint.stages import FOLDER

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

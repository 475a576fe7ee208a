"""The files of the starting model that ``base.source`` names, written down so that DVC sees a change."""

from __future__ import annotations

import glob
from pathlib import Path

from rlhf_core.fingerprint.sources import write_sources
from rlhf_core.fingerprint.stages import FOLDER

NAME = "starting_model"
FILE = f"{FOLDER}/{NAME}.txt"


def write_starting_model(workspace: Path, source: str) -> None:
    """Refresh ``.fingerprints/starting_model.txt``.

    Args:
        source: ``base.source``. A folder counts by its files, a GGUF file by itself; a hub id and ``scratch`` by their
            names, which params.yaml holds.
    """
    path = Path(source).expanduser()
    name = glob.escape(str(path))
    patterns = [f"{name}/**"] if (workspace / path).is_dir() else [name] if (workspace / path).is_file() else []
    write_sources(workspace, patterns, NAME)

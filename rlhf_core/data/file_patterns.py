"""Paths and globs that name data files."""

from __future__ import annotations

import glob
from pathlib import Path

from rlhf_core.errors import DataError

NOT_FOUND = "correct the path, or put quotes around a pattern"


def expand(spec: str, base: Path, remedy: str = NOT_FOUND) -> list[Path]:
    """Return the files that a path or glob matches, relative to ``base``, sorted.

    Raises:
        DataError: There are none; the message ends with ``remedy``.
    """
    pattern = Path(spec).expanduser()
    if (base / pattern).is_file():
        return [base / pattern]
    full = str(pattern) if pattern.is_absolute() else f"{glob.escape(str(base))}/{pattern}"
    matches = sorted(glob.glob(full, recursive=True))
    files = [Path(path) for path in matches if Path(path).is_file()]
    if files:
        return files
    if matches:
        raise DataError(f"{spec} is a folder; name its files, for example {spec.rstrip('/')}/*.jsonl")
    looked_in = "" if pattern.is_absolute() else f" (looked in {base})"
    raise DataError(f"no file matches {spec!r}{looked_in}; {remedy}")

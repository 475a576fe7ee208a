"""Paths and globs that name data files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.errors import DataError

EXCERPT = 200
NOT_FOUND = "correct the path, or put quotes around a pattern"

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(spec: str) -> bool:
    """Return whether a source is a URL such as ``s3://bucket/pairs.jsonl``, and no path."""
    return URL.match(spec) is not None


def expand(spec: str, base: Path, remedy: str = NOT_FOUND) -> list[Path]:
    """Return the files that a path or glob matches, relative to ``base``, sorted.

    A name that exists as it is written is taken literally, also where it holds ``[``, ``]`` or ``*``. A file that a
    pattern matches several times, by way of links to folders, is returned once, by its shortest path.

    Raises:
        DataError: There are none; the message ends with ``remedy``.
    """
    if not spec.strip():
        raise DataError(f"the path {spec!r} is empty; {remedy}")
    # A name that is not UTF-8 has surrogates, which no terminal can print.
    name = spec.encode("utf-8", "backslashreplace").decode()
    name = name if len(name) <= EXCERPT else f"{name[:EXCERPT]}…"
    try:
        return _matches(spec, name, base, remedy)
    except OSError as error:
        raise DataError(f"cannot look up {name}: {error.strerror}; {remedy}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~name of nobody
        raise DataError(f"cannot look up {name!r}: {error}; {remedy}") from error


def _matches(spec: str, name: str, base: Path, remedy: str) -> list[Path]:
    pattern = Path(spec).expanduser()
    if (base / pattern).is_file():
        return [base / pattern]
    parts = list((base / pattern).parts)
    literal = Path(parts.pop(0)) if pattern.is_absolute() or base.is_absolute() else Path()
    while parts and (literal / parts[0]).is_dir():
        literal /= parts.pop(0)
    matches = sorted(glob.glob(os.path.join(glob.escape(str(literal)), *parts), recursive=True))
    files = _once([Path(path) for path in matches if Path(path).is_file()])
    others = [path for path in matches if not Path(path).is_file() and not Path(path).is_dir()]
    if others:
        raise DataError(f"{others[0]} is no file that can be read: a link to nothing or to itself, or a pipe; {remedy}")
    if files:
        return files
    if matches:
        raise DataError(f"{name or base} is a folder; name its files, for example {name.rstrip('/')}/*.jsonl")
    looked_in = "" if pattern.is_absolute() else f" (looked in {base})"
    raise DataError(f"no file matches {name!r}{looked_in}; {remedy}")


def _once(paths: Sequence[Path]) -> list[Path]:
    """Return one path of each file: that of the fewest folders, of several such the first."""
    shortest: dict[Path, Path] = {}
    for path in paths:
        known = shortest.setdefault(path.resolve(), path)
        if len(path.parts) < len(known.parts):
            shortest[path.resolve()] = path
    chosen = set(shortest.values())
    return [path for path in paths if path in chosen]


def spelled(path: Path, spec: str, base: Path) -> str:
    """Return the path of a file that ``spec`` matches as ``spec`` spells it: relative to ``base``, or absolute."""
    return str(path) if Path(spec).expanduser().is_absolute() else Path(os.path.relpath(path, base)).as_posix()

"""Paths and globs that name data files."""

from __future__ import annotations

import glob
import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlhf_core.errors import DataError

EXCERPT = 200
NOT_FOUND = "correct the path, or put quotes around a pattern"

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DATA_NAME = re.compile(r"\.(json|jsonl|ndjson|csv|tsv|parquet|arrow)\Z", re.IGNORECASE)
# What lies beside the data of a folder: descriptions, and what ``datasets`` and Spark write about the data.
NO_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog)\b.*|.*\.(md|rst|crc|py)|_success"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)


def is_url(spec: str) -> bool:
    """Return whether a source is a URL such as ``s3://bucket/pairs.jsonl``, and no path."""
    return URL.match(spec) is not None


def expand(spec: str, base: Path, remedy: str = NOT_FOUND) -> list[Path]:
    """Return the files that a path or glob matches, relative to ``base``, sorted.

    A name that exists as it is written is taken literally, also where it holds ``[``, ``]``, ``*`` or a leading ``~``.
    A folder stands for the files in it and in its folders, see :func:`is_data_name`. A file that a pattern matches
    several times, by way of links to folders, is returned once, by its shortest path.

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
        inside = f" in {error.filename}" if isinstance(error, PermissionError) else ""
        raise DataError(f"cannot look up {name}: {error.strerror}{inside}; {remedy}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~name of nobody
        raise DataError(f"cannot look up {name!r}: {error}; {remedy}") from error


def _matches(spec: str, name: str, base: Path, remedy: str) -> list[Path]:
    if (base / spec).is_file():
        return [base / spec]
    pattern = Path(spec).expanduser()
    if (base / pattern).is_file():
        return [base / pattern]
    parts = list((base / pattern).parts)
    literal = Path(parts.pop(0)) if pattern.is_absolute() or base.is_absolute() else Path()
    while parts and (literal / parts[0]).is_dir():
        literal /= parts.pop(0)
    is_folder = not parts
    matches = sorted(_glob([literal], parts or ["**", "*"]))
    if is_folder:
        matches = [path for path in matches if is_data_name(Path(path).name)]
    files = _once([Path(path) for path in matches if Path(path).is_file()])
    others = [path for path in matches if not Path(path).is_file() and not Path(path).is_dir()]
    if others:
        other = str(others[0]).encode("utf-8", "backslashreplace").decode()
        raise DataError(f"{other} is no file that can be read: a link to nothing or to itself, or a pipe; {remedy}")
    _require_no_lost_folder(matches, files, remedy)
    if files:
        return files
    if is_folder:
        raise DataError(f"the folder {name} holds no file of data; {remedy}")
    if matches:
        raise DataError(f"{name} matches folders only; name one of them, or files, for example {name}/*.jsonl")
    looked_in = "" if pattern.is_absolute() else f" (looked in {base})"
    raise DataError(f"no file matches {name!r}{looked_in}; {remedy}")


def _require_no_lost_folder(matches: Sequence[str], files: Sequence[Path], remedy: str) -> None:
    """Raise ``DataError`` where a pattern matches files and also a folder named as one of data, as Spark writes it.

    The files in it would be left out, unless the pattern goes into folders.
    """
    for folder in (Path(path) for path in matches if DATA_NAME.search(path) and Path(path).is_dir()):
        if files and not any(folder in file.parents for file in files):
            name = str(folder).encode("utf-8", "backslashreplace").decode()
            raise DataError(f"{name} is a folder, whose files the pattern leaves out; name it by itself, or {remedy}")


def is_data_name(name: str) -> bool:
    """Return whether a file of a folder that is given as a whole is taken: all but hidden ones and descriptions."""
    return not name.startswith(".") and not NO_DATA.fullmatch(name)


def _glob(folders: Iterable[Path], parts: Sequence[str]) -> list[str]:
    """Return what a pattern below folders matches, as :func:`glob.glob` does, in time linear in folders.

    ``**`` reads each folder once, however many links lead there: below two links to a common parent there are as many
    paths as orders to follow them in. What a pattern matches below a folder does not depend on the path to it.
    """
    if "**" not in parts:
        return [match for folder in folders for match in glob.glob(os.path.join(glob.escape(str(folder)), *parts))]
    recursive = parts.index("**")
    heads = [Path(match) for match in _glob(folders, parts[:recursive])] if recursive else list(folders)
    below = list(_folders_below(heads))
    rest = list(parts[recursive + 1 :])
    while rest[:1] == ["**"]:
        rest.pop(0)
    return _glob(below, rest or ["*"])


def _folders_below(heads: Iterable[Path]) -> Iterator[Path]:
    """Yield folders and all folders in them, also by way of links, each once by its shortest path.

    Hidden ones are left out, as ``**`` does. Of one that may not be read, ``OSError`` says so: files would be missing.
    """
    waiting = [(len(head.parts), f"{head}/") for head in set(heads)]
    heapq.heapify(waiting)
    seen: set[tuple[int, int]] = set()
    while waiting:
        depth, name = heapq.heappop(waiting)
        try:
            status = os.stat(name)
            identity = status.st_dev, status.st_ino
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(name) as entries:
                inner = [entry.name for entry in entries if _is_folder(entry) and not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield Path(name)
        for entry_name in inner:
            heapq.heappush(waiting, (depth + 1, f"{Path(name) / entry_name}/"))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is reported among the matches
        return False


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
    is_absolute = not (base / spec).exists() and Path(spec).expanduser().is_absolute()
    return str(path) if is_absolute or Path(spec).is_absolute() else Path(os.path.relpath(path, base)).as_posix()

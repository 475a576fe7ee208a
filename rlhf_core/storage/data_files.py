"""Paths, globs and URLs that name data files; URLs such as ``s3://`` go through fsspec."""

from __future__ import annotations

import glob
import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rlhf_core.errors import DataError, first_line, is_exhausted
from rlhf_core.redaction import SECRET_PARAMETER, holds_key, redacted
from rlhf_core.storage.files import scratch_folder

EXCERPT = 200
NOT_FOUND = "correct the path, or put quotes around a pattern"

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DATA_NAME = re.compile(r"\.(json|jsonl|ndjson|csv|tsv|parquet|arrow)\Z", re.IGNORECASE)
# Files of a folder that are not data: descriptions, and what ``datasets`` and Spark write about the
# data.
NO_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog)\b.*|.*\.(md|rst|crc|py)|_success"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)


class NothingMatches(DataError):
    """A path or glob matches no file."""


def is_url(spec: str) -> bool:
    """Return whether a source is a URL such as ``s3://bucket/pairs.jsonl``, and no path."""
    return URL.match(spec) is not None


def expand(spec: str, base: Path, remedy: str = NOT_FOUND) -> list[Path]:
    """Return the files that a path or glob matches, relative to ``base``, sorted.

    A name that exists as it is written is taken literally, even if it holds ``[``, ``]``, ``*`` or
    a leading ``~``. A folder stands for the files in it and in its folders, see
    :func:`is_data_name`. A file that a pattern matches several times, because of links to folders,
    is returned once, by its shortest path.

    Raises:
        NothingMatches: There are none; the message ends with ``remedy``.
        DataError: They cannot be looked up, or the name of one holds a key.
    """
    if not spec.strip():
        raise DataError(f"the path {spec!r} is empty; {remedy}")
    # A name that is not UTF-8 has surrogates, which no terminal can print.
    name = spec.encode("utf-8", "backslashreplace").decode()
    name = name if len(name) <= EXCERPT else f"{name[:EXCERPT]}…"
    try:
        files = _matches(spec, name, base, remedy)
    except OSError as error:
        inside = f" in {error.filename}" if isinstance(error, PermissionError) else ""
        raise DataError(f"cannot look up {name}: {error.strerror}{inside}; {remedy}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~name of nobody
        raise DataError(f"cannot look up {name!r}: {error}; {remedy}") from error
    for file in files:
        require_no_key(spelled(file, spec, base))
    return files


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
        raise DataError(
            f"{other} is no file that can be read: a link to nothing or to itself, or a pipe; {remedy}"
        )
    _require_no_lost_folder(matches, files, remedy)
    if files:
        return files
    if is_folder:
        raise NothingMatches(f"the folder {name} holds no file of data; {remedy}")
    if matches:
        raise DataError(
            f"{name} matches folders only; name one of them, or files, for example {name}/*.jsonl"
        )
    looked_in = "" if pattern.is_absolute() else f" (looked in {base})"
    raise NothingMatches(f"no file matches {name!r}{looked_in}; {remedy}")


def _require_no_lost_folder(matches: Sequence[str], files: Sequence[Path], remedy: str) -> None:
    """Raise ``DataError`` if a pattern matches files and also a folder named as data.

    Spark writes such folders. Their files would be left out, unless the pattern goes into folders.
    """
    for path in matches:
        folder = Path(path)
        if not files or not DATA_NAME.search(path) or not folder.is_dir():
            continue
        if not any(folder in file.parents for file in files):
            name = path.encode("utf-8", "backslashreplace").decode()
            raise DataError(
                f"{name} is a folder, whose files the pattern leaves out; name it by itself, or {remedy}"
            )


def is_data_name(name: str) -> bool:
    """Return whether a file of a whole folder is taken: all but hidden files and descriptions."""
    return not name.startswith(".") and not NO_DATA.fullmatch(name)


def _glob(folders: Iterable[Path], parts: Sequence[str]) -> list[str]:
    """Return what a pattern below folders matches, as :func:`glob.glob` does, but in linear time.

    ``**`` reads each folder once, however many links lead there. Two links to a common parent give
    a path for every order to follow them in. What a pattern matches below a folder does not depend
    on the path to it.
    """
    if "**" not in parts:
        matches = []
        for folder in folders:
            pattern = os.path.join(glob.escape(str(folder)), *parts)
            matches += glob.glob(pattern)
        return matches
    recursive = parts.index("**")
    heads: Iterable[Path] = folders
    if recursive:
        heads = map(Path, _glob(folders, parts[:recursive]))
    below = list(_folders_below(heads))
    rest = list(parts[recursive + 1 :])
    while rest[:1] == ["**"]:
        rest.pop(0)
    return _glob(below, rest or ["*"])


def _folders_below(heads: Iterable[Path]) -> Iterator[Path]:
    """Yield folders and all folders in them, also through links, each once by its shortest path.

    Hidden folders are left out, as by ``**``.

    Raises:
        OSError: A folder may not be read, so that files would be missing.
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
                inner = [entry.name for entry in entries if _is_visible_folder(entry)]
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield Path(name)
        for entry_name in inner:
            heapq.heappush(waiting, (depth + 1, f"{Path(name) / entry_name}/"))


def _is_visible_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:  # a link to itself, which is reported among the matches
        return False


def _once(paths: Sequence[Path]) -> list[Path]:
    """Return one path of each file: the first of those with the fewest folders."""
    shortest: dict[Path, Path] = {}
    for path in paths:
        known = shortest.setdefault(path.resolve(), path)
        if len(path.parts) < len(known.parts):
            shortest[path.resolve()] = path
    chosen = set(shortest.values())
    return [path for path in paths if path in chosen]


def spelled(path: Path, spec: str, base: Path) -> str:
    """Return the path of a file as ``spec`` spells it: relative to ``base``, or absolute."""
    is_of_home = not (base / spec).exists() and Path(spec).expanduser().is_absolute()
    if is_of_home or Path(spec).is_absolute():
        return str(path)
    return Path(os.path.relpath(path, base)).as_posix()


WEB = ("http", "https", "ftp", "ftps")


def require_no_key(name: str) -> None:
    """Raise ``DataError`` for a name of a file, or a URL, that holds a key."""
    if holds_key(name):
        raise DataError(
            f"the name {redacted(name)} holds what is a key, and names are written into dvc.yaml, the manifest and the "
            "logs; rename it"
        )


def require_no_credentials(url: str) -> None:
    """Raise ``DataError`` for a URL that :func:`carries_credentials`, without repeating them.

    A path that holds a key is refused too.
    """
    require_no_key(url)
    if carries_credentials(url):
        scheme = url.split(":")[0]
        raise DataError(
            f"the URL {without_credentials(url)} carries credentials, which would be written into the manifest and the "
            f"logs; leave them out and give them to fsspec (environment variable FSSPEC_{scheme.upper()}), or copy the "
            "file here"
        )


def carries_credentials(url: str) -> bool:
    """Return whether a URL has a password, a web server's user, or a secret parameter.

    The user of a web server usually is a token.

    Other stores write names there that are no secret: ``abfs://container@account``,
    ``github://owner:repository@ref``.
    """
    parts = _split(url)
    if parts is None:
        return False
    has_password = bool(parts.password) and parts.scheme != "github"
    has_user = bool(parts.username) and parts.scheme in WEB
    return has_password or has_user or SECRET_PARAMETER.search(parts.query) is not None


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment, as messages may show it."""
    parts = _split(url)
    if parts is None:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        return None


UNREACHABLE = "check the address, the network, and the access to it"


def expand_url(url: str, remedy: str) -> list[str]:
    """Return the files that a URL names or matches, in their store's spelling, sorted.

    A folder stands for the files in it and in its folders, as one on this machine does.

    Raises:
        DataError: There are none, and the message ends with ``remedy``, or the store cannot be
            reached.
    """
    filesystem, path = _open(url)
    try:
        if filesystem.isfile(path):
            return [filesystem.unstrip_protocol(path)]
        matches = sorted(filesystem.glob(path))
        files = [match for match in matches if filesystem.isfile(match)]
        if matches and not files and not glob.has_magic(path):
            files = _files_below(filesystem, matches[0])
        if not matches and not glob.has_magic(path):
            # A store that cannot be reached says so only here, as the cause of the error.
            filesystem.info(path)
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            cause = first_line(error.__cause__)
            raise DataError(f"cannot look up {url}: {cause}; {UNREACHABLE}") from error
        matches, files = [], []
    except Exception as error:  # Every store raises errors of its own.
        raise DataError(f"cannot look up {url}: {first_line(error)}; {UNREACHABLE}") from error
    if files:
        return [filesystem.unstrip_protocol(file) for file in files]
    if not matches:
        raise DataError(f"no file matches {url!r}; {remedy}")
    if glob.has_magic(path):
        raise DataError(f"{url} matches folders only; {remedy}")
    raise DataError(f"{url} is a folder that holds no file of data; {remedy}")


def _files_below(filesystem: Any, folder: str) -> list[str]:
    """Return the files of a folder and of its folders, but for hidden ones and descriptions."""
    files = []
    for file in filesystem.find(folder):
        path = PurePosixPath(file).relative_to(PurePosixPath(folder))
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_data_name(path.name) and not is_hidden:
            files.append(file)
    return sorted(files)


def local_path(url: str) -> Path | None:
    """Return the path of a local file that :func:`expand_url` names; None for other URLs."""
    scheme, _, path = url.partition("://")
    return Path(path) if scheme == "file" else None


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Copy the file at a URL to a temporary one, which is removed at the end of the block.

    Raises:
        DataError: It cannot be read.
    """
    filesystem, path = _open(url)
    with scratch_folder("rlhf-url-") as folder:
        copy = folder / "content"
        try:
            filesystem.get_file(path, str(copy))
        except Exception as error:
            if is_exhausted(error):
                raise
            raise DataError(f"cannot read {url}: {first_line(error)}") from error
        yield copy


def url_checksum(url: str) -> str:
    """Return what changes with the content of a file at a URL: an ETag, or size and time.

    Nothing is downloaded.

    Raises:
        DataError: The file cannot be looked up.
    """
    filesystem, path = _open(url)
    try:
        return str(filesystem.checksum(path))
    except Exception as error:
        raise DataError(f"cannot look up {url}: {first_line(error)}") from error


def _open(url: str) -> tuple[Any, str]:
    require_no_credentials(url)
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(url.split(":")[0])
        install = f"pip install 'rlhf-pipeline[{extra}]'" if extra else "install it"
        raise DataError(f"{url} needs a package that is missing ({error}); {install}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{url} cannot be opened: {first_line(error)}") from error
    except Exception as error:
        # A file system that needs more than a URL (dir://) fails in ways of its own.
        scheme = url.split(":")[0]
        raise DataError(
            f"{url} cannot be opened: {scheme}:// needs more than a URL; copy the file here, or give its path"
        ) from error
    return filesystem, path

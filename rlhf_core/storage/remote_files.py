"""Data files at URLs (``s3://``, ``gs://``, ``hf://``, ``https://``, ``memory://``), through fsspec."""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rlhf_core.errors import DataError, first_line
from rlhf_core.redaction import SECRET_NAME
from rlhf_core.storage.file_patterns import is_data_name

SECRET_PARAMETER = re.compile(rf"{SECRET_NAME}=", re.IGNORECASE)
WEB = ("http", "https", "ftp", "ftps")


def require_no_credentials(url: str) -> None:
    """Raise ``DataError``, which does not repeat them, for a URL that :func:`carries_credentials`."""
    if carries_credentials(url):
        scheme = url.split(":")[0]
        raise DataError(
            f"the URL {without_credentials(url)} carries credentials, which would be written into the manifest and the "
            f"logs; leave them out and give them to fsspec (environment variable FSSPEC_{scheme.upper()}), or copy the "
            "file here"
        )


def carries_credentials(url: str) -> bool:
    """Return whether a URL has a password, a user of a web server (a token, as a rule), or a parameter named as one.

    Other stores write names there that are no secret: ``abfs://container@account``, ``github://owner:repository@ref``.
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
    """Return the files that a URL names or, with ``*``, ``?`` or ``[``, matches, as their store spells them; sorted.

    A folder stands for the files in it and in its folders, as one on this machine does.

    Raises:
        DataError: There are none, and the message ends with ``remedy``, or the store cannot be reached.
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
            filesystem.info(path)  # A store that cannot be reached says so only here, as the cause.
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise DataError(f"cannot look up {url}: {first_line(error.__cause__)}; {UNREACHABLE}") from error
        matches, files = [], []
    except Exception as error:  # Every store raises errors of its own.
        raise DataError(f"cannot look up {url}: {first_line(error)}; {UNREACHABLE}") from error
    if files:
        return [filesystem.unstrip_protocol(file) for file in files]
    if matches:
        what = "matches folders only" if glob.has_magic(path) else "is a folder that holds no file of data"
        raise DataError(f"{url} {what}; {remedy}")
    raise DataError(f"no file matches {url!r}; {remedy}")


def _files_below(filesystem: Any, folder: str) -> list[str]:
    """Return the files of a folder and of its folders, but for hidden ones and descriptions."""
    below = {file: PurePosixPath(file).relative_to(PurePosixPath(folder)) for file in filesystem.find(folder)}
    return sorted(
        file
        for file, path in below.items()
        if is_data_name(path.name) and not any(part.startswith(".") for part in path.parts)
    )


def local_path(url: str) -> Path | None:
    """Return the path of a file on this machine as :func:`expand_url` names it, ``file://…``; None of any other URL."""
    scheme, _, path = url.partition("://")
    return Path(path) if scheme == "file" else None


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Copy the file at a URL to a temporary one, part by part, which is removed at the end of the block.

    Raises:
        DataError: It cannot be read.
    """
    filesystem, path = _open(url)
    with tempfile.TemporaryDirectory(prefix="rlhf-url-") as folder:
        copy = Path(folder) / "content"
        try:
            filesystem.get_file(path, str(copy))
        except Exception as error:
            raise DataError(f"cannot read {url}: {first_line(error)}") from error
        yield copy


def url_checksum(url: str) -> str:
    """Return what changes when the content of a file at a URL does (an ETag, or size and time); nothing is downloaded.

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
    except Exception as error:  # A file system that needs more than a URL (dir://) fails in ways of its own.
        scheme = url.split(":")[0]
        raise DataError(
            f"{url} cannot be opened: {scheme}:// needs more than a URL; copy the file here, or give its path"
        ) from error
    return filesystem, path

"""Files, URLs and hub ids that hold data, and their rows."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf_core.config.collect import DataSource, SourceOptions
from rlhf_core.data.formats import FileRows, read_records, row_chunks
from rlhf_core.data.hub import PREFIX, load_hub_records
from rlhf_core.data.readers.containers import load_records, records_of
from rlhf_core.data.readers.record_stream import OnRead, stream_records
from rlhf_core.errors import DataError
from rlhf_core.file_patterns import expand, is_url, spelled
from rlhf_core.files import sha256_file
from rlhf_core.remote_files import expand_url, read_url

REMEDY = "correct it in collect.files"


@dataclass(frozen=True)
class SourceFile:
    """A file, URL or hub id to read (``path`` is None for the last two), and how it is read.

    ``name`` is the path as params.yaml spells it: files of one name in two folders have different ones.
    """

    name: str
    path: Path | None
    options: SourceOptions = field(default_factory=SourceOptions)


def source_files(sources: Sequence[str | DataSource], base: Path) -> list[SourceFile]:
    """Return every file, URL and hub id of ``sources`` once, in the order in which they are first named.

    Raises:
        DataError: A source matches no file, or a file is named with two formats or other options.
    """
    files: dict[str, SourceFile] = {}
    for given in sources:
        source = DataSource(path=given) if isinstance(given, str) else given
        options = source.options()
        for key, file in _matches(source.path, base):
            known = files.setdefault(key, replace(file, options=options))
            files[key] = replace(known, options=_merged(known, options))
    return list(files.values())


def _matches(spec: str, base: Path) -> Iterator[tuple[str, SourceFile]]:
    """Yield every file of a source with a key that is the same however the file is named."""
    if spec.startswith(PREFIX):
        yield spec, SourceFile(spec, None)
    elif is_url(spec):
        urls = expand_url(spec, REMEDY)
        yield from ((url, SourceFile(url if glob.has_magic(spec) else spec, None)) for url in urls)
    else:
        for path in expand(spec, base, REMEDY):
            yield str(path.resolve()), SourceFile(spelled(path, spec, base), path)


def _merged(known: SourceFile, options: SourceOptions) -> SourceOptions:
    """Return the options of a file that is named twice: once they may be left out, but not be given differently."""
    default = SourceOptions()
    if options in (default, known.options):
        return known.options
    if known.options == default:
        return options
    formats = known.options.format, options.format
    what = f"the formats {formats[0]} and {formats[1]}" if None not in formats else "different options"
    raise DataError(f"{known.name} is named with {what}; take one of them out of collect.files")


def read_sources(
    sources: Sequence[str | DataSource], kind: str, base: Path, limit: int | None = None
) -> Iterator[FileRows]:
    """Read every file of ``sources`` as rows of ``kind``; ``limit`` bounds the rows taken from the hub."""
    for file in source_files(sources, base):
        yield read_source(file, kind, limit)


def read_source(file: SourceFile, kind: str, limit: int | None = None) -> FileRows:
    """Read one file, URL or hub id as rows of ``kind``; see :func:`read_sources`."""
    result = _read(file, kind, limit)
    result.weight, result.cap = file.options.weight, file.options.cap
    return result


def source_chunks(file: SourceFile, kind: str, limit: int | None, on_read: OnRead) -> Iterator[FileRows]:
    """Yield the rows of a file, URL or hub id in parts; see :func:`~rlhf_core.data.formats.row_chunks`.

    Args:
        limit: Bounds the rows taken from the hub.
        on_read: Told how many more bytes of a file on this machine were read.
    """
    if file.path is None:
        yield read_source(file, kind, limit)
        return
    try:
        digest = sha256_file(file.path)
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror}") from error
    records = stream_records(file.path, on_read)
    yield from row_chunks(records, kind, file.name, digest, str(file.path), file.options)


def _read(file: SourceFile, kind: str, limit: int | None) -> FileRows:
    if file.path is not None:
        records = load_records(file.path)
        return read_records(records, kind, file.name, sha256_file(file.path), str(file.path), file.options)
    if is_url(file.name):
        content = read_url(file.name)
        digest = hashlib.sha256(content).hexdigest()
        return read_records(records_of(file.name, content), kind, file.name, digest, options=file.options)
    records, total = load_hub_records(file.name, limit)
    result = read_records(records, kind, file.name, "", options=file.options)
    result.unread = total - len(records)
    return result

"""Files, URLs and hub ids that hold data, and their rows."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf_core.config.collect import DataSource, FileSources, ReadOptions, SourceOptions
from rlhf_core.data.formats import FileRows, read_records, row_chunks
from rlhf_core.data.hub import PREFIX, load_hub_records
from rlhf_core.data.readers.columns import with_columns
from rlhf_core.data.readers.containers import Record, load_records, records_of
from rlhf_core.data.readers.record_shape import printable
from rlhf_core.data.readers.record_stream import OnRead, stream_records
from rlhf_core.data.readers.registry import PROBE, detect, format_named
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.errors import DataError
from rlhf_core.file_patterns import expand, is_url, spelled
from rlhf_core.files import sha256_file
from rlhf_core.remote_files import expand_url, read_url

COLLECT_FILES = "collect.files"


@dataclass(frozen=True)
class SourceFile:
    """A file, URL or hub id to read (``path`` is None for the last two), and how it is read.

    ``name`` is the path as params.yaml spells it: files of one name in two folders have different ones.
    """

    name: str
    path: Path | None
    options: SourceOptions = field(default_factory=SourceOptions)


def source_files(sources: Sequence[str | DataSource], base: Path, parameter: str = COLLECT_FILES) -> list[SourceFile]:
    """Return every file, URL and hub id of ``sources`` once, in the order in which they are first named.

    ``parameter`` is the one that names them, for messages.

    Raises:
        DataError: A source matches no file, or a file is named with two formats or other options.
    """
    files: dict[str, SourceFile] = {}
    for given in sources:
        source = DataSource(path=given) if isinstance(given, str) else given
        options = source.options()
        for key, file in _matches(source.path, base, f"correct it in {parameter}"):
            known = files.setdefault(key, replace(file, options=options))
            files[key] = replace(known, options=_merged(known, options, parameter))
    return list(files.values())


def _matches(spec: str, base: Path, remedy: str) -> Iterator[tuple[str, SourceFile]]:
    """Yield every file of a source with a key that is the same however the file is named."""
    if spec.startswith(PREFIX):
        yield spec, SourceFile(spec, None)
    elif is_url(spec):
        urls = expand_url(spec, remedy)
        yield from ((url, SourceFile(url if glob.has_magic(spec) else spec, None)) for url in urls)
    else:
        for path in expand(spec, base, remedy):
            _require_utf8_name(path)
            yield str(path.resolve()), SourceFile(spelled(path, spec, base), path)


def _require_utf8_name(path: Path) -> None:
    """Raise ``DataError`` for a path that no manifest and no table can hold."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the name of {printable(str(path))} is not UTF-8; rename the file") from error


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """Raise ``DataError`` if a file changes while the block reads it: rows and hash would be of different versions."""
    before = _version(path)
    yield
    if _version(path) != before:
        raise DataError(f"{path} changed while it was read; wait until it is written, and run this again")


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None where it cannot be looked up."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def sources_by_kind(files: Sequence[str], base: Path, options: ReadOptions, kind: str | None = None) -> FileSources:
    """Return files as sources of ``kind``, by default each as what it serves as best.

    Args:
        files: Paths, globs, URLs or hub ids.
        base: The folder that relative paths start at.
        options: How the rows are read.
        kind: One of ``ROW_TYPES``.

    Raises:
        DataError: A file cannot be read, or is of no known format.
    """
    sources: dict[str, list[DataSource]] = {}
    for spec in files:
        source = DataSource(path=spec, **options.model_dump())
        sources.setdefault(kind or kinds_of(source_files([source], base)[0])[0], []).append(source)
    return FileSources(**{name: tuple(listed) for name, listed in sources.items()})


def _merged(known: SourceFile, options: SourceOptions, parameter: str) -> SourceOptions:
    """Return the options of a file that is named twice: once they may be left out, but not be given differently."""
    default = SourceOptions()
    if options in (default, known.options):
        return known.options
    if known.options == default:
        return options
    formats = known.options.format, options.format
    what = f"the formats {formats[0]} and {formats[1]}" if None not in formats else "different options"
    raise DataError(f"{known.name} is named with {what}; take one of them out of {parameter}")


def read_sources(
    sources: Sequence[str | DataSource],
    kind: str,
    base: Path,
    limit: int | None = None,
    parameter: str = COLLECT_FILES,
) -> Iterator[FileRows]:
    """Read every file of ``sources`` as rows of ``kind``; ``limit`` bounds the rows taken from the hub."""
    for file in source_files(sources, base, parameter):
        yield read_source(file, kind, limit)


def read_source(file: SourceFile, kind: str, limit: int | None = None) -> FileRows:
    """Read one file, URL or hub id as rows of ``kind``; see :func:`read_sources`."""
    result = _read(file, kind, limit)
    result.weight, result.cap, result.licence = file.options.weight, file.options.cap, file.options.licence
    return result


def kinds_of(file: SourceFile) -> tuple[str, ...]:
    """Return the kinds of rows that a file can serve as, best first; without a named format the file is read for that.

    Raises:
        DataError: The file cannot be read, or is of no known format, or serves as nothing.
    """
    if file.options.format is None:
        where = str(file.path or file.name)
        shape = detect(with_columns(_records(file), file.options, where), where)
    else:
        shape = format_named(file.options.format)
    if not shape.carries:
        note = f" ({shape.note})" if shape.note else ""
        raise DataError(f"{file.name} is of format {shape.name}, which serves as nothing{note}")
    return tuple(kind for kind in ROW_TYPES if kind in shape.carries)


def _records(file: SourceFile) -> list[Record]:
    """Return the records of a file, of a hub data set the first thousand."""
    if file.path is not None:
        return load_records(file.path)
    if is_url(file.name):
        return records_of(file.name, read_url(file.name))
    return load_hub_records(file.name, PROBE).records


def source_chunks(file: SourceFile, kind: str, limit: int | None, on_read: OnRead) -> Iterator[FileRows]:
    """Yield the rows of a file, URL or hub id in parts; see :func:`~rlhf_core.data.formats.row_chunks`.

    Args:
        limit: Bounds the rows taken from the hub.
        on_read: Told how many more bytes of a file on this machine were read.
    """
    if file.path is None:
        yield read_source(file, kind, limit)
        return
    with _unchanged(file.path):
        try:
            digest = sha256_file(file.path)
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror}") from error
        records = stream_records(file.path, on_read)
        yield from row_chunks(records, kind, file.name, digest, str(file.path), file.options)


def _read(file: SourceFile, kind: str, limit: int | None) -> FileRows:
    if file.path is not None:
        with _unchanged(file.path):
            records, digest = load_records(file.path), sha256_file(file.path)
        return read_records(records, kind, file.name, digest, str(file.path), file.options)
    if is_url(file.name):
        content = read_url(file.name)
        digest = hashlib.sha256(content).hexdigest()
        return read_records(records_of(file.name, content), kind, file.name, digest, options=file.options)
    loaded = load_hub_records(file.name, limit)
    result = read_records(loaded.records, kind, file.name, "", options=file.options)
    result.unread = None if loaded.total is None else loaded.total - len(loaded.records)
    result.revision = loaded.commit
    return result

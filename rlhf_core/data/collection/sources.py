"""Files, URLs and hub ids that hold data, and their rows.

A data set of the Hugging Face hub is ``hub:owner/name[/config][@revision][:split]``.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from rlhf_core.config.data import CollectConfig, DataSource, FileSources, ReadOptions, SourceOptions
from rlhf_core.config.formats import FormatName
from rlhf_core.data.collection.rows import FileRows, joined, row_chunks
from rlhf_core.data.readers.detection import (
    PROBE,
    first_records,
    format_named,
    printable,
    recognised,
    unread_replies,
)
from rlhf_core.data.readers.stream import kind_of, stream_records, uncounted
from rlhf_core.data.readers.table_records import OnRead
from rlhf_core.data.row_counts import Record
from rlhf_core.errors import DataError, first_line, is_exhausted
from rlhf_core.fingerprint.tracked_files import plugin_line
from rlhf_core.plugins import READERS
from rlhf_core.storage.data_files import (
    NothingMatches,
    expand,
    expand_url,
    is_url,
    local_copy,
    local_path,
    require_no_credentials,
    spelled,
)
from rlhf_core.storage.files import sha256_file

COLLECT_FILES = "collect.files"
ARGUMENTS = "the command"
SHOWN_FILES = 5
# Folders of a workspace that the stages collect and validate replace as a whole.
REPLACED = ("data/raw", "data/clean", "data/docs", "data/card")


@dataclass(frozen=True)
class SourceFile:
    """A file, URL or hub id to read, and how it is read; URLs and hub ids have no ``path``.

    Attributes:
        name: The path as params.yaml spells it: files of one name in two folders have different
            ones.
        label: What its rows call it, wherever params.yaml lies: the file's name, with as many
            folders as tell it from other files of that name. So workspaces that read the same files
            make the same rows.
    """

    name: str
    path: Path | None
    options: SourceOptions = field(default_factory=SourceOptions)
    label: str = ""


def source_files(
    sources: Sequence[str | DataSource], base: Path, parameter: str = COLLECT_FILES
) -> list[SourceFile]:
    """Return every file, URL and hub id of ``sources`` once, in the order of their first mention.

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
    paths = [file.path.resolve() for file in files.values() if file.path is not None]
    return [replace(file, label=_label(file, paths)) for file in files.values()]


def _label(file: SourceFile, paths: Sequence[Path]) -> str:
    """Return the shortest end of a file's path that no other path has; a URL or hub id as it is."""
    if file.path is None:
        return file.name
    parts = file.path.resolve().parts
    for length in range(1, len(parts)):
        end = parts[-length:]
        if sum(path.parts[-length:] == end for path in paths) == 1:
            return "/".join(end)
    return "/".join(parts)


def annotation_sources(pattern: str | None, base: Path) -> list[DataSource]:
    """Return the files that ``pattern`` (``collect.annotations``) matches, which may be none."""
    if pattern is None:
        return []
    try:
        files = expand(pattern, base, "correct it in collect.annotations, which may be null")
    except NothingMatches:
        return []
    return [DataSource(path=spelled(file, pattern, base)) for file in files]


def collected_paths(config: CollectConfig, base: Path) -> list[str]:
    """Return all that ``collect`` reads: paths, globs, URLs, hub ids, and files of annotations."""
    annotated = []
    if config.pairs:
        annotated = annotation_sources(config.annotations, base)
    return [*config.files.paths(), *(source.path for source in annotated)]


def reader_lines(config: CollectConfig) -> list[str]:
    """Describe the plugins whose readers the sources name: another version may read other rows."""
    names: set[str] = set()
    for kind in type(config.files).model_fields:
        names.update(source.format for source in config.files.of(kind) if source.format is not None)
    own = get_args(FormatName)
    return [plugin_line(READERS, name) for name in sorted(names.difference(own))]


def require_kept(paths: Iterable[str], workspace: Path) -> None:
    """Raise ``DataError`` for a source in a folder that a stage replaces and would delete it with.

    Sources that match nothing are left for the stage that reads them to report.
    """
    folders = {name: (workspace / name).resolve() for name in REPLACED}
    for spec in paths:
        files: list[Path] = []
        if is_url(spec):
            local = local_path(spec)
            files = [local] if local else []
        elif not spec.startswith(PREFIX):
            with suppress(DataError):
                files = expand(spec, workspace)
        for file in files:
            for inside, folder in folders.items():
                if file.resolve().is_relative_to(folder):
                    if is_url(spec):
                        name = spec
                    else:
                        name = spelled(file, spec, workspace)
                    raise DataError(
                        f"{name} lies in {inside}, which is replaced by what a stage writes; "
                        "move it to another folder, and correct its path in params.yaml"
                    )


def _matches(spec: str, base: Path, remedy: str) -> Iterator[tuple[str, SourceFile]]:
    """Yield every file of a source with a key that is the same however the file is named."""
    if spec.startswith(PREFIX):
        yield spec, SourceFile(spec, None)
    elif is_url(spec):
        urls = expand_url(spec, remedy)
        _require_files_of_data(spec, urls)
        for url in urls:
            # The files of a folder have other names than the folder.
            has_its_name = PurePosixPath(spec).name == PurePosixPath(url).name
            is_named = has_its_name and not glob.has_magic(spec)
            local = local_path(url)
            key = str(local.resolve()) if local else url
            name = spec if is_named else url
            yield key, SourceFile(name, None)
    else:
        paths = expand(spec, base, remedy)
        _require_files_of_data(spec, [spelled(path, spec, base) for path in paths])
        for path in paths:
            try:
                str(path).encode("utf-8")
            except UnicodeEncodeError as error:  # no manifest and no table can hold such a name
                raise DataError(
                    f"the name of {printable(str(path))} is not UTF-8; rename the file"
                ) from error
            yield str(path.resolve()), SourceFile(spelled(path, spec, base), path)


def _require_files_of_data(spec: str, names: Sequence[str]) -> None:
    """Refuse a pattern or folder that has other files beside data, and say which pattern has not.

    Raises:
        DataError: names the other files, and a pattern for each kind of file that can be read.
    """
    others: list[str] = []
    endings: dict[str, None] = {}
    for name in names:
        try:
            kind, compression = kind_of(name)
        except DataError:
            others.append(name)
        else:
            endings[f"*{kind}{compression}"] = None
    if not others or not endings:  # where none can be read, the first says so itself
        return
    folder = spec.rstrip("/") + "/"
    if glob.has_magic(spec):
        folder = spec[: spec.rfind("/") + 1]
    patterns = " and ".join(repr(folder + ending) for ending in endings)
    shown = ", ".join(PurePosixPath(name).name for name in others[:SHOWN_FILES])
    more = f" and {len(others) - SHOWN_FILES} more" if len(others) > SHOWN_FILES else ""
    raise DataError(
        f"{printable(spec)} has files that hold no rows ({printable(shown)}{more}); name those that do, such as {patterns}"
    )


@contextmanager
def _unchanged(path: Path | None) -> Iterator[None]:
    """Raise ``DataError`` if a file changes while the block reads it.

    Its rows and its hash would be of different versions.

    A hub data set has no path: its commit fixes its content.
    """

    def version() -> tuple[int, int, int] | None:
        with suppress(OSError):
            status = path.stat() if path else None
            return status and (status.st_ino, status.st_size, status.st_mtime_ns)
        return None

    before = version()
    yield
    if version() != before:
        raise DataError(
            f"{path} changed while it was read; wait until it is written, and run this again"
        )


def data_source(spec: str, options: ReadOptions) -> DataSource:
    """Return a source that a command names; :class:`DataError` for a URL with credentials."""
    # The URLs of params.yaml are checked when it is loaded.
    if is_url(spec):
        require_no_credentials(spec)
    return DataSource(path=spec, **options.model_dump())


def sources_by_kind(
    files: Sequence[str], base: Path, options: ReadOptions, kind: str | None = None
) -> FileSources:
    """Return paths, globs, URLs and hub ids as sources of ``kind``.

    Without a kind, each file is a source of the kind that it serves as best.

    Raises:
        DataError: A file cannot be read, or is of no known format.
    """
    sources: dict[str, list[DataSource]] = {}
    for spec in files:
        source = data_source(spec, options)
        if kind is not None:
            sources.setdefault(kind, []).append(source)
            continue
        for file in source_files([source], base, ARGUMENTS):
            of_file = source.model_copy(update={"path": file.name})
            sources.setdefault(best_kind(file), []).append(of_file)
    return FileSources(**{name: tuple(listed) for name, listed in sources.items()})


def _merged(known: SourceFile, options: SourceOptions, parameter: str) -> SourceOptions:
    """Return the options of a file that is named twice.

    They may be left out once, but not be given differently.
    """
    default = SourceOptions()
    if options in (default, known.options):
        return known.options
    if known.options == default:
        return options
    formats = known.options.format, options.format
    what = "different options" if None in formats else f"the formats {formats[0]} and {formats[1]}"
    raise DataError(f"{known.name} is named with {what}; take one of them out of {parameter}")


def read_sources(
    sources: Sequence[str | DataSource],
    kind: str,
    base: Path,
    limit: int | None = None,
    parameter: str = COLLECT_FILES,
) -> Iterator[FileRows]:
    """Read every file of ``sources`` as rows of ``kind``, all of which must fit the memory."""
    for file in source_files(sources, base, parameter):
        yield joined(source_chunks(file, kind, limit))


@contextmanager
def open_source(
    file: SourceFile, limit: int | None = None, on_read: OnRead = uncounted
) -> Iterator[OpenSource]:
    """Open a file, URL or hub id, whose records are read bit by bit while the block lasts.

    Args:
        limit: The most rows to take from the hub.
        on_read: Called with the number of bytes of a local file that are read so far.
    """
    if file.path is not None:
        yield OpenSource(stream_records(file.path, on_read), str(file.path), file.path)
    elif is_url(file.name):
        with local_copy(file.name) as copy:
            yield OpenSource(stream_records(copy, name=file.name), file.name, copy)
    else:
        yield load_hub_records(file.name, limit)


def best_kind(file: SourceFile) -> str:
    """Return the kind of rows that a file serves as best.

    Raises:
        DataError: Its replies would be left unread.
    """
    if file.options.format is not None:
        return format_named(file.options.format).kinds[0]
    with open_source(file, PROBE) as source:
        first = first_records(source.records)
    shape = recognised(first, file.options, source.where)
    kind = shape.kinds[0]
    if unread := unread_replies(first, file.options, shape):
        raise DataError(
            f"{file.name} would be read as {kind}, but {unread}, or choose --kind {kind}"
        )
    return kind


def source_chunks(
    file: SourceFile, kind: str | None, limit: int | None = None, on_read: OnRead = uncounted
) -> Iterator[FileRows]:
    """Yield the rows of a file, URL or hub id in parts, as ``row_chunks`` does.

    Args:
        kind: One of ``ROW_TYPES``; None for what the file serves as best.
        limit: The most rows to take from the hub.
        on_read: Called with the number of further bytes of a local file that were read.
    """
    reported = 0

    def report(position: int) -> None:
        nonlocal reported
        on_read(max(position - reported, 0))
        reported = max(position, reported)

    with open_source(file, limit, report) as source, _unchanged(source.path):
        try:
            if source.path is None:
                digest = ""
            else:
                digest = sha256_file(source.path)
        except OSError as error:
            raise DataError(f"cannot read {source.where}: {error.strerror}") from error
        for part in row_chunks(
            source.records, kind, file.name, digest, source.where, file.options, file.label
        ):
            part.counts.unread = source.unread
            part.counts.revision = source.revision
            yield part


PREFIX = "hub:"
HUB_ID = re.compile(
    r"hub:(?P<name>[^/@:\s]+(?:/[^/@:\s]+)?)(?:/(?P<config>[^/@:\s]+))?(?:@(?P<revision>[^@:\s]+))?(?::(?P<split>.+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
# A path of this form is only looked up on the hub: a local folder of the same name is not taken for
# the data set.
HUB_PATH = "hf://datasets/{}"
BATCH_ROWS = 2048


@dataclass(frozen=True)
class HubId:
    """A data set on the hub, by default the newest commit of its only or default configuration."""

    name: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class OpenSource:
    """The records of a source, which can be read once.

    Attributes:
        where: What messages call the source.
        path: The file that is read, for a URL a copy of it; None for a hub id.
        unread: How many rows of a hub data set a limit leaves out; None if the hub does not say.
        revision: The commit of a hub data set; empty if a cached copy does not say.
    """

    records: Iterator[Record]
    where: str
    path: Path | None = None
    unread: int | None = 0
    revision: str = ""


def parse_hub_id(spec: str) -> HubId:
    """Return the parts of a hub id; :class:`DataError` for anything else."""
    match = HUB_ID.fullmatch(spec)
    if match is None:
        raise DataError(
            f"{spec!r} is not a hub id; write hub:owner/name, or hub:owner/name/config@revision:split"
        )
    return HubId(match["name"], match["config"], match["revision"], match["split"] or "train")


def load_hub_records(spec: str, limit: int | None = None) -> OpenSource:
    """Load the first ``limit`` records of a hub data set, without downloading more than these.

    Without a limit, the data set is downloaded to the cache, and its records are read from there
    some thousand at a time. With ``HF_HUB_OFFLINE=1`` they come from the cached copy. Only data is
    loaded, never a repository's own code.

    Raises:
        DataError: The id, the revision or the split does not exist, the cached copy is of another
            revision, or the network fails.
    """
    hub_id = parse_hub_id(spec)
    from huggingface_hub import HfApi, constants, is_offline_mode

    from rlhf_core.hub import require_hub

    require_hub(spec, DataError)
    online = not is_offline_mode()
    if not online and hub_id.revision and not COMMIT.fullmatch(hub_id.revision):
        raise DataError(
            f"{spec}: with HF_HUB_OFFLINE, name the commit itself: {hub_id.revision} cannot be looked up"
        )
    from datasets import load_dataset_builder

    try:
        commit = hub_id.revision
        if online:
            about: Any = HfApi(endpoint=constants.ENDPOINT).dataset_info(
                hub_id.name, revision=commit
            )
            commit = str(about.sha)
        builder = load_dataset_builder(HUB_PATH.format(hub_id.name), hub_id.config, revision=commit)
        if commit and builder.hash != commit:
            raise DataError(f"the cached copy is of the commit {builder.hash}")
        if limit is not None and online:
            streamed = builder.as_streaming_dataset(split=hub_id.split)
            rows: Iterator[Any] = iter(list(islice(streamed, limit)))
            known = (builder.info.splits or {}).get(hub_id.split)
            total = known.num_examples if known else None
        else:
            builder.download_and_prepare()
            data = builder.as_dataset(split=hub_id.split)
            total = len(data)
            if limit is not None:
                data = data.select(range(min(limit, total)))
            rows = _stored_rows(data)
        first = next(rows, None)
    except Exception as error:  # The library raises many unrelated types.
        if is_exhausted(error):
            raise
        raise DataError(
            f"{spec}: cannot load the data set ({first_line(error)}); check the id, the revision, the split and the "
            "network"
        ) from error
    if first is None:
        raise DataError(f"{spec} has no rows; name a split that has: hub:{hub_id.name}:SPLIT")
    records = (Record(position, row) for position, row in enumerate(chain([first], rows), 1))
    unread: int | None = 0
    if limit is not None:
        if total is None:
            unread = None
        else:
            unread = max(total - limit, 0)
    revision = str(builder.hash or "")
    if not COMMIT.fullmatch(revision):
        revision = ""
    return OpenSource(records, spec, unread=unread, revision=revision)


def _stored_rows(data: Any) -> Iterator[Any]:
    """Yield the rows of a data set that is stored on this machine."""
    from rlhf_core.data.tables import table_slices

    for table in data.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for part in table_slices(table, BATCH_ROWS):
            yield from part.to_pylist()

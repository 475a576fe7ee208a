"""Describe how readers understand files: format, rows, refusals, examples, lengths (``rlhf data inspect``)."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.hub import PREFIX
from rlhf_core.data.collection.rows import FileRows, row_chunks
from rlhf_core.data.collection.sources import SourceFile, open_source, require_utf8_name
from rlhf_core.data.inspection.report_lines import INDENT, column_lines, example_lines, percentile_table, wrapped
from rlhf_core.data.lengths import (
    PERCENTILES,
    SEQUENCE,
    TokenCounts,
    character_lengths,
    evenly_spread,
    percentiles,
)
from rlhf_core.data.readers.columns import unused_summary, with_columns
from rlhf_core.data.readers.detection import detect, first_records, format_named
from rlhf_core.data.row_counts import ReasonCounts, RowCounts
from rlhf_core.data.schema import ROW_TYPES, tables_of
from rlhf_core.data.tables import bytes_in_memory, drained
from rlhf_core.data.text import language_shares
from rlhf_core.storage.file_patterns import expand, is_url
from rlhf_core.storage.remote_files import expand_url

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_ROWS = 1000
LANGUAGE_CHARACTERS = 1000
PROFILE, CHINESE_PROFILE = "own-data", "chinese-sample"
NEW_WORKSPACE = "my-run"
CONTINUED = " \\\n        "
# Rows that are kept to count tokens and to tell the language: at least so many of a file that has them, fewer where
# twice as many are larger than that.
SAMPLED_ROWS = 2000
SAMPLED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TokenLimit:
    """The parameter that bounds the sequences of a kind, its value, and the positions of the model (None: no bound)."""

    parameter: str
    value: int
    positions: int | None = None

    @property
    def longest_kept(self) -> int:
        """The length of the longest sequence that is kept."""
        return self.value if self.positions is None else min(self.value, self.positions)

    def exceeded_by(self, lengths: Sequence[int]) -> int:
        """How many of the sequences would be dropped."""
        return sum(length > self.longest_kept for length in lengths)

    def remedy(self, longest: int) -> str:
        """Say how sequences of up to ``longest`` tokens could be kept."""
        if self.positions is None or longest <= self.positions:
            return f"to keep all of them: --set {self.parameter}={longest}"
        if self.value >= self.positions:
            return f"the model takes {self.positions} at most: only one with more positions keeps them"
        return f"to keep more of them: --set {self.parameter}={self.positions}, which is what the model takes at most"


@dataclass(frozen=True)
class TokenLimits:
    """What lengths in tokens are measured with.

    Attributes:
        tokenizer_name: What messages call the tokenizer.
        limits: By kind of rows, what bounds its sequences.
    """

    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    limits: Mapping[str, TokenLimit]


@dataclass
class EvenSample:
    """Rows that are evenly spread over a file of unknown length: every ``stride``-th, which doubles as they grow."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    stride: int = 1
    total: int = 0
    size: int = 0

    def add(self, rows: Sequence[dict[str, Any]], positions: Sequence[int]) -> None:
        """Take in the next rows of the file, with their positions there."""
        for row, position in zip(rows, positions, strict=True):
            if self.total % self.stride == 0:
                self.rows.append(row | {"position": position})
                self.size += bytes_in_memory(row)
            self.total += 1
            while len(self.rows) > 2 * SAMPLED_ROWS or (self.size > SAMPLED_BYTES and len(self.rows) > 1):
                self.rows = self.rows[::2]
                self.size = sum(map(bytes_in_memory, self.rows))
                self.stride *= 2

    def spread(self) -> list[dict[str, Any]]:
        """Return up to ``SAMPLED_ROWS`` rows of the whole file, each with its ``position``."""
        return [self.rows[i] for i in evenly_spread(len(self.rows), SAMPLED_ROWS)] if self.rows else []


@dataclass
class FileDescription:
    """How one file is read; it is described part by part.

    Attributes:
        counts: What became of its records, as rows of the first of its kinds.
        spec: The argument that named it.
        kinds: The kinds of rows that it can serve as; it is read as the first.
        wanted_examples: How many of the first rows are kept as ``examples``.
        lengths: By text column, the characters of every row, part by part.
        sample: Some of the rows.
        languages: Shares of the languages that its texts' script tells (Chinese, Japanese, Korean).
        tokens: Of the sample; None where they are not counted.
    """

    counts: RowCounts
    spec: str
    kinds: tuple[str, ...]
    wanted_examples: int
    examples: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    sample: EvenSample = field(default_factory=EvenSample)
    languages: Mapping[str, float] = field(default_factory=dict)
    tokens: TokenCounts | None = None

    @property
    def kind(self) -> str:
        """The kind of rows that the file is read as."""
        return self.kinds[0]

    @property
    def characters(self) -> dict[str, tuple[int, ...]]:
        """Percentiles of the characters of each text column; none without rows."""
        return {name: percentiles(np.concatenate(parts)) for name, parts in self.lengths.items()}

    def add(self, part: FileRows) -> None:
        """Take in the next part of the file."""
        self.counts.take(part.counts)
        self.examples += part.rows[: self.wanted_examples - len(self.examples)]
        for table in tables_of(self.kind, part.rows):
            for name, lengths in character_lengths(self.kind, table).items():
                self.lengths.setdefault(name, []).append(lengths)
        self.sample.add(part.rows, part.positions)


@dataclass(frozen=True)
class Description:
    """How several files are read, and with what."""

    files: Sequence[FileDescription]
    options: ReadOptions
    base: Path
    limits: TokenLimits | None = None


def describe_sources(
    files: Sequence[str],
    base: Path | None = None,
    tokens: TokenLimits | None = None,
    options: ReadOptions | None = None,
    show: int = 1,
) -> Description:
    """Read every file, some thousand records at a time, and describe it.

    Args:
        files: Paths, globs, URLs or hub ids; of a hub id the first 1,000 rows are read. A file that several of them
            name is described once.
        base: The folder of relative paths, by default the current one.
        tokens: Lengths are measured in tokens too, if set.
        options: How the rows are read, where that is not recognised.
        show: How many rows of each file are kept as examples.

    Raises:
        DataError: A file cannot be read at all.
    """
    base, options = base or Path.cwd(), options or ReadOptions()
    described = []
    seen: set[Path] = set()
    for spec in files:
        if spec.startswith(PREFIX):
            sources = [SourceFile(spec, None)]
        elif is_url(spec):
            sources = [SourceFile(url, None) for url in expand_url(spec, "correct the address")]
        else:
            paths = [path for path in expand(spec, base) if path.resolve() not in seen]
            for path in paths:
                require_utf8_name(path)
                seen.add(path.resolve())
            sources = [SourceFile(str(path), path) for path in paths]
        described += [_describe(source, spec, tokens, options, show) for source in sources]
    return Description(described, options, base, tokens)


def _describe(
    source: SourceFile, spec: str, tokens: TokenLimits | None, options: ReadOptions, show: int
) -> FileDescription:
    with open_source(source, HUB_ROWS) as opened:
        first = first_records(opened.records)
        mapped = with_columns(first, options, source.name)
        shape = format_named(options.format) if options.format else detect(mapped, source.name)
        del mapped
        kinds = tuple(kind for kind in ROW_TYPES if kind in shape.carries) or tuple(ROW_TYPES)
        file = FileDescription(RowCounts(source.name, kinds[0], shape.name), spec, kinds, show)
        records = chain(drained(first), opened.records)
        for part in row_chunks(records, file.kind, Path(source.name).name, "", source.name, options):
            file.add(part)
    sample = file.sample.spread()
    if tokens is not None and file.kind in tokens.limits and sample:
        file.tokens = TokenCounts(file.kind, file.counts.kept)
        for row in sample:
            file.tokens.add(tokens.tokenizer, row)
    file.languages = language_shares(["\n".join(texts_of(row))[:LANGUAGE_CHARACTERS] for row in sample])
    return file


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """Return the texts of a row of any kind: the turns of its prompt, its replies, or its text."""
    turns = [str(turn["content"]) for turn in row.get("prompt") or ()]
    return [*turns, *(str(row[name]) for name in ("chosen", "rejected", "reply", "text") if name in row)]


def as_json_value(description: Description) -> dict[str, Any]:
    """Return a description as JSON values: a list of files with examples, and the next command."""
    files = []
    for file in description.files:
        counts = file.counts
        value: dict[str, Any] = {
            "file": file.counts.source,
            "format": counts.format,
            "serves": list(file.kinds),
            "kind": file.kind,
            "records": counts.records,
            "rows": counts.kept,
            "expanded": counts.expanded,
            "dropped": dict(counts.dropped),
            **unused_summary(counts.unused),
            "noticed": dict(counts.noticed),
            "refused": [
                {"reason": refused.reason, "count": refused.rows, "first": refused.first.position}
                for refused in counts.reasons.commonest()
            ],
            "characters": {name: _percentiles(values) for name, values in file.characters.items()},
            "languages": dict(file.languages),
            "examples": file.examples,
        }
        if file.tokens is not None and description.limits is not None:
            limit, lengths = description.limits.limits[file.kind], file.tokens.lengths.get(SEQUENCE, [])
            value["tokens"] = {
                "percentiles": _percentiles(percentiles(lengths)),
                "parameter": limit.parameter,
                "limit": limit.longest_kept,
                "rows": file.tokens.looked_at,
                "over_limit": limit.exceeded_by(lengths),
                "unwritable": [
                    {"reason": count.reason, "first": count.first.position, "rows": count.rows}
                    for count in ReasonCounts.of(file.tokens.unwritable).values()
                ],
                "marked": file.tokens.marked,
            }
        files.append(value)
    command = _init_command(description)
    return {"files": files, "next": " ".join(command) if command else None}


def _percentiles(values: Sequence[int]) -> dict[str, int]:
    return {str(percentile): value for percentile, value in zip(PERCENTILES, values, strict=False)}


def as_text(description: Description, width: int = 80) -> str:
    """Return a block of lines per file, and the command that makes a workspace of them.

    Args:
        width: Columns of the terminal: rows are cut to it, other texts wrapped.
    """
    blocks = [_block(file, description, width) for file in description.files]
    unusable = [file.counts.source for file in description.files if not file.counts.kept]
    if unusable:
        without = (
            f"no row of {', '.join(unusable)} can be used: mend what is refused, or say how the rows are to be read "
            "(--format, --column)"
        )
        blocks.append(textwrap.fill(without, max(width, 40), break_long_words=False, break_on_hyphens=False))
    command = _init_command(description)
    if command is None:
        missing = "next: a pipeline needs pairs of replies; add a file that serves as preferences to these"
        return "\n\n".join([*blocks, textwrap.fill(missing, width)])
    # A shell takes the command only with its arguments whole, so it is broken between them.
    line = f"next: {' '.join(command)}"
    return "\n\n".join([*blocks, line if len(line) <= width else f"next: {CONTINUED.join(command)}"])


def _block(file: FileDescription, description: Description, width: int) -> str:
    read = file.counts
    expanded = " (some give several)" if read.expanded else ""
    lines = [
        file.counts.source,
        f"  format   {read.format}",
        f"  serves   {', '.join(file.kinds)}",
        f"  rows     {read.kept} as {file.kind}, of {read.records}{expanded}",
    ]
    for reason, count in read.dropped.most_common():
        lines += wrapped(f"  dropped  {count}: ", reason, width)
    for refused in read.reasons.commonest():
        reason = f"{refused.reason} (first at row {refused.first.position})"
        lines += wrapped(f"  refused  {refused.rows}: ", reason, width)
    lines += column_lines(read, width)
    if file.languages:
        shares = ", ".join(f"{tag} {share:.0%}" for tag, share in file.languages.items())
        lines += wrapped("  language ", f"{shares} of the rows looked at", width)
    for row in file.examples:
        lines += ["  example", *example_lines(file.kind, row, width)]
    return "\n".join([*lines, *_lengths(file, description.limits, width)])


def _lengths(file: FileDescription, limits: TokenLimits | None, width: int) -> list[str]:
    """Return the table of lengths: characters of each column, and with a tokenizer what ``max_tokens`` would drop."""
    if not file.characters:
        return []
    lines = ["  lengths", *percentile_table("characters", file.characters, width)]
    if file.tokens is None or limits is None:
        if limits is None:
            lines += wrapped(INDENT * 2, "no tokens: there is no tokenizer at hand; name one with --tokenizer", width)
        return lines
    limit, measured = limits.limits[file.kind], file.tokens
    looked_at = f" of the {measured.looked_at} rows looked at" if measured.looked_at < measured.rows else ""
    for count in ReasonCounts.of(measured.unwritable).values():
        where = f"{count.reason} (first at row {count.first.position})"
        lines += wrapped(INDENT * 2, f"{count.rows}{looked_at or ' of the rows'} have no tokens: {where}", width)
    if measured.marked:
        marked = f"{measured.marked}{looked_at or ' of the rows'} have a reply with a marker, such as </think>"
        lines += wrapped(INDENT * 2, f"{marked}: it is trained as the chat template writes it", width)
    lengths = measured.lengths.get(SEQUENCE, [])
    if not lengths:
        return lines
    over_limit = limit.exceeded_by(lengths)
    verdict = f"none{looked_at} is longer"
    if over_limit:
        share = over_limit / measured.looked_at
        verdict = f"{share:.1%}{looked_at or ' of the rows'} are longer and would be dropped"
    lines += percentile_table("tokens", {SEQUENCE: percentiles(lengths)}, width)
    about = f"{limit.parameter} is {limit.longest_kept}: {verdict} (tokenizer of {limits.tokenizer_name})"
    lines += wrapped(INDENT * 2, about, width)
    return lines + (wrapped(INDENT * 2, limit.remedy(max(lengths)), width) if over_limit else [])


def _init_command(description: Description) -> list[str] | None:
    """Return the arguments of the ``rlhf init`` command for these sources, by the kind that each serves as best.

    Sources without usable rows are left out. None if no other serves as preferences.
    """
    kind_of: dict[str, str] = {}
    for file in description.files:
        if file.counts.kept:
            kind_of.setdefault(file.spec, file.kind)
    by_kind: dict[str, list[str]] = {}
    for spec, kind in kind_of.items():
        by_kind.setdefault(kind, []).append(spec)
    if "preferences" not in by_kind:
        return None
    given = description.options.model_dump(exclude_defaults=True)
    command = [f"rlhf init {_free_name(description.base)} --profile {_profile(description.files)}"]
    for kind in (kind for kind in ROW_TYPES if kind in by_kind):
        entries: list[Any] = [{"path": spec, **given} if given else spec for spec in by_kind[kind]]
        quoted = json.dumps(entries, ensure_ascii=False)
        command.append(f"--set {shlex.quote(f'collect.files.{kind}={quoted}')}")
    return command


def _profile(files: Sequence[FileDescription]) -> str:
    """Return the profile that suits the pairs: the Chinese one where most of them are Chinese."""
    pairs = [file for file in files if file.kind == "preferences"]
    chinese = sum(file.counts.kept * file.languages.get("zh", 0.0) for file in pairs)
    return CHINESE_PROFILE if chinese > sum(file.counts.kept for file in pairs) / 2 else PROFILE


def _free_name(base: Path) -> str:
    """Return a name for a new workspace that nothing in ``base`` has."""
    number, name = 1, NEW_WORKSPACE
    while (base / name).exists():
        number += 1
        name = f"{NEW_WORKSPACE}-{number}"
    return name

"""Describe how readers understand files: format, rows, refusals, examples, lengths
(``rlhf data inspect``).
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.collection.sources import (
    ARGUMENTS,
    SourceFile,
    data_source,
    source_chunks,
    source_files,
)
from rlhf_core.data.inspection.report_lines import (
    INDENT,
    example_lines,
    outcome_lines,
    percentile_table,
    wrapped,
)
from rlhf_core.data.readers.detection import format_named, unused_summary
from rlhf_core.data.row_counts import ReasonCounts, RowCounts
from rlhf_core.data.schema import ROW_TYPES, tables_of
from rlhf_core.data.statistics import (
    PERCENTILES,
    SEQUENCE,
    TokenCounts,
    character_lengths,
    evenly_spread,
    percentiles,
)
from rlhf_core.data.tables import bytes_in_memory
from rlhf_core.data.text import language_shares

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_ROWS = 1000
LANGUAGE_CHARACTERS = 1000
PROFILE, CHINESE_PROFILE = "own-data", "chinese-sample"
NEW_WORKSPACE = "my-run"
CONTINUED = " \\\n        "
# Rows that are kept to count tokens and to tell the language: at least so many of a file that has
# them, fewer where twice as many are larger than that.
SAMPLED_ROWS = 2000
SAMPLED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TokenLimit:
    """The parameter that bounds the sequences of a kind, its value, and the positions of the model
    (None: no bound).
    """

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
            return (
                f"the model takes {self.positions} at most: only one with more positions keeps them"
            )
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
    """Rows that are evenly spread over a file of unknown length: every ``stride``-th, which doubles
    as they grow.
    """

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
            while len(self.rows) > 2 * SAMPLED_ROWS or (
                self.size > SAMPLED_BYTES and len(self.rows) > 1
            ):
                self.rows = self.rows[::2]
                self.size = sum(map(bytes_in_memory, self.rows))
                self.stride *= 2

    def spread(self) -> list[dict[str, Any]]:
        """Return up to ``SAMPLED_ROWS`` rows of the whole file, each with its ``position``."""
        return (
            [self.rows[i] for i in evenly_spread(len(self.rows), SAMPLED_ROWS)] if self.rows else []
        )


@dataclass
class FileDescription:
    """How a file is read.

    Attributes:
        spec: The argument that named it.
        counts: What became of its records, which are read as the kind that it serves as best.
        lengths: By text column, the characters of every row, part by part.
        languages: Shares of the languages that its texts' script tells (Chinese, Japanese, Korean).
        tokens: Of the sample; None where they are not counted.
    """

    name: str
    spec: str
    counts: RowCounts
    examples: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    sample: EvenSample = field(default_factory=EvenSample)
    languages: Mapping[str, float] = field(default_factory=dict)
    tokens: TokenCounts | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows that the file can serve as, best first."""
        return format_named(self.counts.format).kinds

    @property
    def characters(self) -> dict[str, tuple[int, ...]]:
        """Percentiles of the characters of each text column; none without rows."""
        return {name: percentiles(np.concatenate(parts)) for name, parts in self.lengths.items()}


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
        files: Paths, globs, URLs or hub ids; of a hub id the first 1,000 rows are read. A file that
            several of them name is described once.
        base: The folder of relative paths, by default the current one.
        show: How many rows of each file are kept as examples.
    """
    base, options = base or Path.cwd(), options or ReadOptions()
    described: dict[Path | str, FileDescription] = {}
    for spec in files:
        for source in source_files([data_source(spec, options)], base, ARGUMENTS):
            key = source.path.resolve() if source.path else source.name
            if key not in described:
                described[key] = _describe(source, spec, tokens, show)
    return Description([*described.values()], options, base, tokens)


def _describe(
    source: SourceFile, spec: str, tokens: TokenLimits | None, show: int
) -> FileDescription:
    file: FileDescription | None = None
    for part in source_chunks(source, None, HUB_ROWS):
        file = file or FileDescription(str(source.path or source.name), spec, part.counts.empty())
        file.counts.take(part.counts)
        file.examples += part.rows[: show - len(file.examples)]
        for table in tables_of(part.counts.kind, part.rows):
            for name, lengths in character_lengths(part.counts.kind, table).items():
                file.lengths.setdefault(name, []).append(lengths)
        file.sample.add(part.rows, part.positions)
    assert file is not None, "a source without rows is refused"
    sample = file.sample.spread()
    if tokens is not None and file.counts.kind in tokens.limits and sample:
        file.tokens = TokenCounts(file.counts.kind, file.counts.kept)
        for row in sample:
            file.tokens.add(tokens.tokenizer, row)
    file.languages = language_shares(
        ["\n".join(_texts_of(row))[:LANGUAGE_CHARACTERS] for row in sample]
    )
    return file


def _texts_of(row: Mapping[str, Any]) -> list[str]:
    turns = [str(turn["content"]) for turn in row.get("prompt") or ()]
    return [
        *turns,
        *(str(row[name]) for name in ("chosen", "rejected", "reply", "text") if name in row),
    ]


def as_json_value(description: Description) -> dict[str, Any]:
    """Return a description as JSON values: a list of files with examples, and the next command."""
    files = []
    for file in description.files:
        counts = file.counts
        value: dict[str, Any] = {
            "file": file.name,
            "format": counts.format,
            "serves": list(file.kinds),
            "kind": counts.kind,
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
            limit, lengths = (
                description.limits.limits[counts.kind],
                file.tokens.lengths.get(SEQUENCE, []),
            )
            value["tokens"] = {
                "percentiles": _percentiles(percentiles(lengths)),
                "parameter": limit.parameter,
                "limit": limit.longest_kept,
                "rows": file.tokens.looked_at,
                "over_limit": limit.exceeded_by(lengths),
                "unwritable": [
                    {
                        "reason": unwritable.reason,
                        "first": unwritable.first.position,
                        "rows": unwritable.rows,
                    }
                    for unwritable in ReasonCounts.of(file.tokens.unwritable).values()
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
    blocks = ["\n".join(_lines(file, description.limits, width)) for file in description.files]
    unusable = [file.name for file in description.files if not file.counts.kept]
    if unusable:
        without = (
            f"no row of {', '.join(unusable)} can be used: mend what is refused, or say how the rows are to be read "
            "(--format, --column)"
        )
        blocks.append(
            textwrap.fill(without, max(width, 40), break_long_words=False, break_on_hyphens=False)
        )
    command = _init_command(description)
    if command is None:
        missing = "next: a pipeline needs pairs of replies; add a file that serves as preferences to these"
        return "\n\n".join([*blocks, textwrap.fill(missing, width)])
    # A shell takes the command only with its arguments whole, so it is broken between them.
    line = f"next: {' '.join(command)}"
    return "\n\n".join(
        [*blocks, line if len(line) <= width else f"next: {CONTINUED.join(command)}"]
    )


def _lines(file: FileDescription, limits: TokenLimits | None, width: int) -> list[str]:
    read = file.counts
    lines = [
        file.name,
        f"  format   {read.format}",
        f"  serves   {', '.join(file.kinds)}",
        f"  rows     {read.kept} as {read.kind}, of {read.records}{' (some give several)' if read.expanded else ''}",
    ]
    lines += outcome_lines(read, width)
    if file.languages:
        shares = ", ".join(f"{tag} {share:.0%}" for tag, share in file.languages.items())
        lines += wrapped("  language ", f"{shares} of the rows looked at", width)
    for row in file.examples:
        lines += ["  example", *example_lines(read.kind, row, width)]
    if file.characters:
        lines += ["  lengths", *percentile_table("characters", file.characters, width)]
        if limits is None:
            lines += wrapped(
                INDENT * 2,
                "no tokens: there is no tokenizer at hand; name one with --tokenizer",
                width,
            )
        elif file.tokens is not None:
            lines += _token_lines(file.tokens, limits, width)
    return lines


def _token_lines(measured: TokenCounts, limits: TokenLimits, width: int) -> list[str]:
    """Return percentiles of tokens, which rows have none, and what ``max_tokens`` would drop."""
    limit, lines = limits.limits[measured.kind], list[str]()
    looked_at = (
        f" of the {measured.looked_at} rows looked at" if measured.looked_at < measured.rows else ""
    )
    of_rows = looked_at or " of the rows"
    for unwritable in ReasonCounts.of(measured.unwritable).values():
        where = f"{unwritable.reason} (first at row {unwritable.first.position})"
        lines += wrapped(INDENT * 2, f"{unwritable.rows}{of_rows} have no tokens: {where}", width)
    if measured.marked:
        marked = f"{measured.marked}{of_rows} have a reply with a marker, such as </think>"
        lines += wrapped(
            INDENT * 2, f"{marked}: it is trained as the chat template writes it", width
        )
    if lengths := measured.lengths.get(SEQUENCE, []):
        share = limit.exceeded_by(lengths) / measured.looked_at
        verdict = (
            f"{share:.1%}{of_rows} are longer and would be dropped"
            if share
            else f"none{looked_at} is longer"
        )
        about = f"{limit.parameter} is {limit.longest_kept}: {verdict} (tokenizer of {limits.tokenizer_name})"
        lines += percentile_table("tokens", {SEQUENCE: percentiles(lengths)}, width)
        lines += wrapped(INDENT * 2, about, width)
        lines += wrapped(INDENT * 2, limit.remedy(max(lengths)), width) if share else []
    return lines


def _init_command(description: Description) -> list[str] | None:
    """Return the arguments of the ``rlhf init`` command for these sources, by the kind that each
    serves as best.

    Sources without usable rows are left out, and those whose files serve as several kinds are named
    file by file. None if no other serves as preferences. The profile suits the language of most
    pairs.
    """
    usable = [file for file in description.files if file.counts.kept]
    kinds_of: defaultdict[str, set[str]] = defaultdict(set)
    for file in usable:
        kinds_of[file.spec].add(file.counts.kind)
    kinds = {
        file.spec if len(kinds_of[file.spec]) == 1 else file.name: file.counts.kind
        for file in usable
    }
    if "preferences" not in kinds.values():
        return None
    pairs = [file for file in description.files if file.counts.kind == "preferences"]
    chinese = sum(file.counts.kept * file.languages.get("zh", 0.0) for file in pairs)
    profile = CHINESE_PROFILE if chinese > sum(file.counts.kept for file in pairs) / 2 else PROFILE
    names = (NEW_WORKSPACE if number == 1 else f"{NEW_WORKSPACE}-{number}" for number in count(1))
    free = next(name for name in names if not (description.base / name).exists())
    command = [f"rlhf init {free} --profile {profile}"]
    given = description.options.model_dump(exclude_defaults=True)
    for kind in (kind for kind in ROW_TYPES if kind in kinds.values()):
        entries = [
            {"path": spec, **given} if given else spec
            for spec, served in kinds.items()
            if served == kind
        ]
        quoted = json.dumps(entries, ensure_ascii=False)
        command.append(f"--set {shlex.quote(f'collect.files.{kind}={quoted}')}")
    return command

"""Describe how readers understand files, for ``rlhf data inspect``."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.text import Text

from rlhf_core.config.data import ReadOptions
from rlhf_core.config.loading import load_params
from rlhf_core.config.params import Params
from rlhf_core.data.collection.sources import (
    ARGUMENTS,
    SourceFile,
    data_source,
    source_chunks,
    source_files,
)
from rlhf_core.data.readers.detection import format_named, unused_summary
from rlhf_core.data.row_counts import ReasonCounts, RowCounts
from rlhf_core.data.schema import REPLIES, ROW_TYPES, tables_of
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
from rlhf_core.stages.token_lengths import (
    BASE,
    load_counting_tokenizer,
    local_starting_model,
    model_positions,
)
from rlhf_extras.data_files.report_lines import INDENT, column_lines, percentile_table, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_ROWS = 1000
LANGUAGE_CHARACTERS = 1000
PROFILE, CHINESE_PROFILE = "own-data", "chinese-sample"
NEW_WORKSPACE = "my-run"
LABEL_WIDTH = 9
CONTINUED = " \\\n        "
# Rows that are kept to count tokens and to tell the language: at least so many of a file that has
# them, or fewer if twice as many take more bytes than this.
SAMPLED_ROWS = 2000
SAMPLED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TokenLimit:
    """The parameter that bounds the sequences of a kind, and what the model takes at most.

    Attributes:
        parameter: Its name in params.yaml.
        value: Its value.
        positions: The positions of the model; None if it has no bound.
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


def local_token_limits(workspace: Path) -> TokenLimits | None:
    """Return tokenizer and limits of a workspace; None where it has no model with a tokenizer.

    That is the starting model where it is on this machine, else models/base. Nothing is downloaded.
    A tokenizer made from nothing depends on the data, so that other data would change it.

    Raises:
        RlhfError: params.yaml is wrong, or the model folder is incomplete.
    """
    params = load_params(workspace)
    source = local_starting_model(params, workspace)
    if source is None and (workspace / BASE).is_dir():
        source = str(BASE)
    return None if source is None else token_limits(params, source, workspace)


def token_limits(params: Params, source: str, base: Path) -> TokenLimits:
    """Return the tokenizer of ``source`` with the limits of ``params`` and of its model.

    Args:
        source: A folder, a GGUF file or a hub id.
        base: The folder that relative paths start at.

    Raises:
        ModelError: It has no usable tokenizer, or its config.json is damaged.
    """
    tokenizer = load_counting_tokenizer(source, base)
    bound = model_positions(base / Path(os.path.expanduser(source)))
    limits = {
        "preferences": TokenLimit("reward.max_tokens", params.reward.max_tokens, bound),
        "demonstrations": TokenLimit("sft.max_tokens", params.sft.max_tokens, bound),
    }
    return TokenLimits(tokenizer, source, limits)


@dataclass
class EvenSample:
    """Rows that are evenly spread over a file of unknown length.

    Every ``stride``-th row is kept, and ``stride`` doubles as they grow in number.
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
            while self._is_too_large():
                self.rows = self.rows[::2]
                self.size = sum(map(bytes_in_memory, self.rows))
                self.stride *= 2

    def _is_too_large(self) -> bool:
        has_large_rows = self.size > SAMPLED_BYTES and len(self.rows) > 1
        return has_large_rows or len(self.rows) > 2 * SAMPLED_ROWS

    def spread(self) -> list[dict[str, Any]]:
        """Return up to ``SAMPLED_ROWS`` rows of the whole file, each with its ``position``."""
        if not self.rows:
            return []
        return [self.rows[i] for i in evenly_spread(len(self.rows), SAMPLED_ROWS)]


@dataclass
class FileDescription:
    """How a file is read.

    Attributes:
        spec: The argument that named it.
        counts: What became of its records, which are read as the kind that it serves as best.
        lengths: By text column, the characters of every row, part by part.
        languages: Shares of the languages that can be told by their script (Chinese, Japanese,
            Korean).
        tokens: The tokens of the sample; None if they are not counted.
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
        files: Paths, globs, URLs or hub ids. The first 1,000 rows of a hub id are read. A file that
            several of them name is described once.
        base: The folder that relative paths start at, by default the current one.
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
        file = file or FileDescription(str(source.path or source.name), spec, part.counts)
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
    beginnings = []
    for row in sample:
        texts = [turn["content"] for turn in row.get("prompt") or ()]
        texts += [row[name] for name in ("chosen", "rejected", "reply", "text") if name in row]
        beginnings.append("\n".join(texts)[:LANGUAGE_CHARACTERS])
    file.languages = language_shares(beginnings)
    return file


def as_json_value(description: Description) -> dict[str, Any]:
    """Return a description as JSON values: a list of files with examples, and the next command."""
    files = [_file_as_json(file, description.limits) for file in description.files]
    command = _init_command(description)
    return {"files": files, "next": " ".join(command) if command else None}


def _file_as_json(file: FileDescription, limits: TokenLimits | None) -> dict[str, Any]:
    counts = file.counts
    refused = []
    for reason in counts.reasons.commonest():
        refused.append(
            {"reason": reason.reason, "count": reason.rows, "first": reason.first.position}
        )
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
        "refused": refused,
        "characters": {name: _by_percentile(values) for name, values in file.characters.items()},
        "languages": dict(file.languages),
        "examples": file.examples,
    }
    if file.tokens is None or limits is None:
        return value
    limit, lengths = limits.limits[counts.kind], file.tokens.lengths.get(SEQUENCE, [])
    unwritable = []
    for reason in ReasonCounts.of(file.tokens.unwritable).values():
        unwritable.append(
            {"reason": reason.reason, "first": reason.first.position, "rows": reason.rows}
        )
    value["tokens"] = {
        "percentiles": _by_percentile(percentiles(lengths)),
        "parameter": limit.parameter,
        "limit": limit.longest_kept,
        "rows": file.tokens.looked_at,
        "over_limit": limit.exceeded_by(lengths),
        "unwritable": unwritable,
        "marked": file.tokens.marked,
    }
    return value


def _by_percentile(values: Sequence[int]) -> dict[str, int]:
    return dict(zip(map(str, PERCENTILES), values, strict=False))


def as_text(description: Description, width: int = 80) -> str:
    """Return a block of lines per file, and the command that makes a workspace of them.

    Args:
        width: The columns of the terminal. Rows are cut to it, and other texts wrapped.
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
    line = f"next: {' '.join(command)}"
    if len(line) > width:
        # A shell takes the command only with whole arguments, so it is broken between them.
        line = f"next: {CONTINUED.join(command)}"
    return "\n\n".join([*blocks, line])


def _lines(file: FileDescription, limits: TokenLimits | None, width: int) -> list[str]:
    read = file.counts
    several = " (some give several)" if read.expanded else ""
    lines = [
        file.name,
        f"  format   {read.format}",
        f"  serves   {', '.join(file.kinds)}",
        f"  rows     {read.kept} as {read.kind}, of {read.records}{several}",
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
    looked_at = ""
    if measured.looked_at < measured.rows:
        looked_at = f" of the {measured.looked_at} rows looked at"
    of_rows = looked_at or " of the rows"
    for unwritable in ReasonCounts.of(measured.unwritable).values():
        where = f"{unwritable.reason} (first at row {unwritable.first.position})"
        lines += wrapped(INDENT * 2, f"{unwritable.rows}{of_rows} have no tokens: {where}", width)
    if measured.marked:
        marked = f"{measured.marked}{of_rows} have a reply with a marker, such as </think>"
        lines += wrapped(
            INDENT * 2, f"{marked}: it is trained as the chat template writes it", width
        )
    lengths = measured.lengths.get(SEQUENCE, [])
    if not lengths:
        return lines
    share = limit.exceeded_by(lengths) / measured.looked_at
    verdict = f"none{looked_at} is longer"
    if share:
        verdict = f"{share:.1%}{of_rows} are longer and would be dropped"
    about = f"{limit.parameter} is {limit.longest_kept}: {verdict} (tokenizer of {limits.tokenizer_name})"
    lines += percentile_table("tokens", {SEQUENCE: percentiles(lengths)}, width)
    lines += wrapped(INDENT * 2, about, width)
    if share:
        lines += wrapped(INDENT * 2, limit.remedy(max(lengths)), width)
    return lines


def _init_command(description: Description) -> list[str] | None:
    """Return the arguments of the ``rlhf init`` command that makes a workspace of these sources.

    Each source is named under the kind that it serves as best, or file by file if its files serve
    as several. Sources without usable rows are left out. The profile suits the language of most
    pairs. None if no source serves as preferences.
    """
    usable = [file for file in description.files if file.counts.kept]
    kinds_of: defaultdict[str, set[str]] = defaultdict(set)
    for file in usable:
        kinds_of[file.spec].add(file.counts.kind)
    paths: dict[str, dict[str, None]] = {kind: {} for kind in ROW_TYPES}
    for file in usable:
        path = file.spec if len(kinds_of[file.spec]) == 1 else file.name
        paths[file.counts.kind][path] = None
    if not paths["preferences"]:
        return None
    pairs = [file for file in usable if file.counts.kind == "preferences"]
    chinese = sum(file.counts.kept * file.languages.get("zh", 0.0) for file in pairs)
    is_chinese = chinese > sum(file.counts.kept for file in pairs) / 2
    free, number = NEW_WORKSPACE, 1
    while (description.base / free).exists():
        number += 1
        free = f"{NEW_WORKSPACE}-{number}"
    command = [f"rlhf init {free} --profile {CHINESE_PROFILE if is_chinese else PROFILE}"]
    given = description.options.model_dump(exclude_defaults=True)
    for kind, of_kind in paths.items():
        if of_kind:
            sources: list[Any] = list(of_kind)
            if given:
                sources = [{"path": path, **given} for path in of_kind]
            quoted = json.dumps(sources, ensure_ascii=False)
            command.append(f"--set {shlex.quote(f'collect.files.{kind}={quoted}')}")
    return command


def outcome_lines(counts: RowCounts, width: int) -> list[str]:
    """Return what became of the records that give no row, and the lines of :func:`column_lines`."""
    lines = []
    for reason, rows in counts.dropped.most_common():
        lines += wrapped(f"  dropped  {rows}: ", reason, width)
    for refused in counts.reasons.commonest():
        reason = f"{refused.reason} (first at row {refused.first.position})"
        lines += wrapped(f"  refused  {refused.rows}: ", reason, width)
    return lines + column_lines(counts, width)


def example_lines(kind: str, row: Mapping[str, Any], width: int) -> list[str]:
    """Return a row as a line per turn and reply, each cut to ``width``."""
    if kind == "pretrain":
        texts = [("text", row["text"])]
    else:
        texts = [(turn["role"], turn["content"]) for turn in row["prompt"]]
        texts += [(name, row[name]) for name in REPLIES[kind]]
    lines = []
    for label, text in texts:
        line = Text(f"{INDENT * 2}{label:<{LABEL_WIDTH}}  {' '.join(text.split())}")
        line.truncate(width, overflow="ellipsis")  # in columns: a Chinese character takes two
        lines.append(line.plain)
    return lines

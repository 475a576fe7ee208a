"""Describe how readers understand a file: format, rows, refusals, an example, lengths (the command ``rlhf data``)."""

from __future__ import annotations

import io
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.collect import ReadOptions
from rlhf_core.data.formats import FileRows, read_records
from rlhf_core.data.hub import PREFIX, load_hub_records
from rlhf_core.data.lengths import PERCENTILES, REPLIES, LengthPercentiles, character_lengths, token_lengths
from rlhf_core.data.readers.columns import with_columns
from rlhf_core.data.readers.containers import Record, load_records, records_of
from rlhf_core.data.readers.registry import detect, format_named
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.file_patterns import NOT_FOUND, expand, is_url
from rlhf_core.remote_files import expand_url, read_url

HUB_ROWS = 1000
INDENT, LABEL_WIDTH = "  ", 9
NEW_WORKSPACE = "my-run"


@dataclass(frozen=True)
class TokenLimits:
    """What lengths in tokens are measured with.

    Attributes:
        tokenizer_name: What messages call the tokenizer.
        limits: By kind of rows, the parameter that bounds its sequences, and its value or the model's if that is less.
    """

    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    limits: Mapping[str, tuple[str, int]]


def describe_sources(
    files: Sequence[str],
    show: int = 1,
    base: Path | None = None,
    width: int = 80,
    tokens: TokenLimits | None = None,
    options: ReadOptions | None = None,
) -> str:
    """Return a block of lines per file, and the command that makes a workspace of them.

    Args:
        files: Paths, globs, URLs or hub ids; of a hub id the first 1,000 rows are read.
        show: How many rows of each file are quoted.
        base: The folder of relative paths, by default the current one.
        width: Columns of the terminal; the quoted rows are cut to it.
        tokens: Lengths are given in tokens too, if set.
        options: How the rows are read, where that is not recognised.

    Raises:
        DataError: A file cannot be read at all.
    """
    blocks = []
    kinds: dict[str, str] = {}
    for spec in files:
        if spec.startswith(PREFIX):
            sources = [(spec, load_hub_records(spec, HUB_ROWS)[0])]
        elif is_url(spec):
            sources = [(url, records_of(url, read_url(url))) for url in expand_url(spec, NOT_FOUND)]
        else:
            sources = [(str(path), load_records(path)) for path in expand(spec, base or Path.cwd())]
        for where, records in sources:
            kind, block = _describe(records, where, show, width, tokens, options or ReadOptions())
            kinds.setdefault(spec, kind)
            blocks.append(block)
    return "\n\n".join([*blocks, _next_command(kinds, options or ReadOptions())])


def _describe(
    records: Sequence[Record],
    where: str,
    show: int,
    width: int,
    tokens: TokenLimits | None,
    options: ReadOptions,
) -> tuple[str, str]:
    """Return the kind of rows that the file serves as, and its description."""
    mapped = with_columns(records, options, where)
    shape = format_named(options.format) if options.format else detect(mapped, where)
    kinds = [kind for kind in ROW_TYPES if kind in shape.carries] or list(ROW_TYPES)
    kind = kinds[0]
    read = read_records(records, kind, Path(where).name, "", where, options)
    lines = [
        where,
        f"  format   {shape.name}",
        f"  serves   {', '.join(kinds)}",
        f"  rows     {len(read.rows)} as {kind}, of {len(records)}{' (some give several)' if read.expanded else ''}",
        *(f"  dropped  {n}: {reason}" for reason, n in read.dropped.most_common()),
        *_refusals(read),
        *(f"  unused   {n}: the column {name} is not read" for name, n in read.unused.most_common()),
    ]
    for row in read.rows[:show]:
        lines += ["  example", *_example(kind, row, width)]
    lines += _lengths(kind, read.rows, width, tokens)
    return kind, "\n".join(lines)


def _refusals(read: FileRows) -> list[str]:
    """Return the reasons with their counts and the first row of each."""
    counts = Counter(row["reason"] for row in read.refused)
    first: dict[str, int] = {}
    for row in read.refused:
        first.setdefault(row["reason"], row["position"])
    return [f"  refused  {n}: {reason} (first at row {first[reason]})" for reason, n in counts.most_common()]


def _example(kind: str, row: Mapping[str, Any], width: int) -> list[str]:
    """Return a row as a line per turn and reply, each cut to ``width``."""
    if kind == "pretrain":
        texts = [("text", row["text"])]
    else:
        texts = [(turn["role"], turn["content"]) for turn in row["prompt"]]
        texts += [(name, row[name]) for name in REPLIES.get(kind, ())]
    lines = []
    for label, text in texts:
        line = Text(f"{INDENT * 2}{label:<{LABEL_WIDTH}}  {' '.join(text.split())}")
        line.truncate(width, overflow="ellipsis")  # in columns: a Chinese character takes two
        lines.append(line.plain)
    return lines


def _lengths(kind: str, rows: Sequence[Mapping[str, Any]], width: int, tokens: TokenLimits | None) -> list[str]:
    """Return the table of lengths: characters of each column, and with a tokenizer what ``max_tokens`` would drop."""
    characters = character_lengths(kind, rows)
    if not characters:
        return []
    lines = ["  lengths", *_percentile_table("characters", characters, width)]
    if tokens is None or kind not in tokens.limits:
        return lines
    parameter, limit = tokens.limits[kind]
    measured = token_lengths(tokens.tokenizer, kind, rows, limit)
    looked_at = f" of the {measured.rows} rows looked at" if measured.rows < len(rows) else ""
    if measured.over_limit:
        share = measured.over_limit / measured.rows
        finding = f"{share:.1%}{looked_at or ' of the rows'} are longer and would be dropped"
    else:
        finding = f"none{looked_at} is longer"
    lines += _percentile_table("tokens", [measured.percentiles], width)
    return [*lines, f"    {parameter} is {limit}: {finding} (tokenizer of {tokens.tokenizer_name})"]


def _percentile_table(unit: str, rows: Sequence[LengthPercentiles], width: int) -> list[str]:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=len("prompt + reply"))
    for _ in PERCENTILES:
        table.add_column(justify="right", min_width=6)
    table.add_row(unit, *(f"{p} %" if p < 100 else "longest" for p in PERCENTILES))
    for row in rows:
        table.add_row(row.name, *map(str, row.values))
    output = io.StringIO()
    Console(file=output, width=max(width - 2 * len(INDENT), 40), color_system=None).print(table)
    return [f"{INDENT * 2}{line.rstrip()}" for line in output.getvalue().splitlines()]


def _next_command(kinds: Mapping[str, str], options: ReadOptions) -> str:
    """Return the ``rlhf init`` command for these sources, given as the kind of rows that each serves as best."""
    by_kind: dict[str, list[str]] = {}
    for spec, kind in kinds.items():
        by_kind.setdefault(kind, []).append(spec)
    if "preferences" not in by_kind:
        return "next: a pipeline needs pairs of replies; add a file that serves as preferences to these"
    sets = []
    given = options.model_dump(exclude_defaults=True)
    for kind, specs in by_kind.items():
        entries: list[Any] = [{"path": spec, **given} if given else spec for spec in specs]
        quoted = json.dumps(entries, ensure_ascii=False)
        sets.append(f"--set {shlex.quote(f'collect.files.{kind}={quoted}')}")
    return f"next: rlhf init {NEW_WORKSPACE} --profile own-data {' '.join(sets)}"

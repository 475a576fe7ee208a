"""Validate raw tables: clean tables, quarantined rows and counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rlhf_core.config.validate import ValidateConfig
from rlhf_core.data.derived import DERIVED_FROM, derive
from rlhf_core.data.schema import ROW_TYPES, arrow_schema, read_table
from rlhf_core.data.validation.checks import SOURCE_PASSED, check_frame, checks_for, passing
from rlhf_core.data.validation.expectations import run_suites
from rlhf_core.data.validation.provenance import Origin, read_provenance
from rlhf_core.data.validation.quarantine import Quarantined, quarantine_rows, read_refused
from rlhf_core.data.validation.severity import split_by_severity
from rlhf_core.errors import DataError
from rlhf_core.files import read_json


@dataclass
class Validated:
    """Clean tables, all quarantined rows, and counts by kind.

    Attributes:
        raw_rows: Rows that were checked or refused by readers.
        refused_rows: Those that readers refused.
        left_out: Rows without a fault: over a limit of lengths, or derived from rows that were refused.
        cut_rows: Rows that ``collect.limit`` left out; nothing was checked of them but that readers can read them.
        failed_checks: Rows that each check refused; 0 is there for checks that fail the set.
        origins: The file and line of every clean row, by kind; empty for rows of no file.
        warned_checks: Rows that stay although they fail a check that only warns.
    """

    clean: dict[str, pa.Table]
    quarantined: list[Quarantined]
    raw_rows: dict[str, int]
    failed_checks: dict[str, Counter[str]] = field(default_factory=dict)
    warned_checks: dict[str, Counter[str]] = field(default_factory=dict)
    origins: dict[str, list[Origin]] = field(default_factory=dict)
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    cut_rows: Mapping[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def quarantined_share(self, kind: str) -> float:
        """Return the share of bad rows among all that were read: a cut row counts as bad as often as a checked one.

        Rows that are ``left_out`` are in the quarantine, but do not count here.
        """
        refused, cut = self.refused_rows.get(kind, 0), self.cut_rows.get(kind, 0)
        checked = self.raw_rows[kind] - refused
        failed = sum(row.kind == kind for row in self.quarantined) - refused - self.left_out[kind]
        read = self.raw_rows[kind] + cut
        return (refused + (failed * (checked + cut) / checked if checked else 0)) / read if read else 0.0


@dataclass(frozen=True)
class RawData:
    """What the collect stage wrote.

    Attributes:
        tables: The rows, by kind.
        refused: Rows that readers refused.
        derived: Kinds that were derived from others.
        cut: How many rows of a kind ``collect.limit`` left out.
        origins: The file and line of every row, by kind; empty for rows of no file.
    """

    tables: Mapping[str, pa.Table]
    refused: Sequence[Quarantined] = ()
    derived: Collection[str] = ()
    cut: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, Sequence[Origin]] = field(default_factory=dict)


def read_raw(raw: Path) -> RawData:
    """Read the folder ``data/raw``; ``DataError`` when a file is missing or has other columns or another length."""
    tables = {}
    for kind in ROW_TYPES:
        path = raw / kind / "data.parquet"
        table, schema = read_table(path), arrow_schema(kind)
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            raise DataError(f"{path} lacks the column {', '.join(missing)}; collect the data again")
        try:
            tables[kind] = table.select(schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise DataError(f"{path} has columns of other types than the schema's: {error}") from error
        with contextlib.suppress(pa.ArrowInvalid):  # a column of over 2 GiB stays in chunks
            tables[kind] = tables[kind].combine_chunks()
    origins = read_provenance(raw / "provenance.parquet")
    for kind, listed in origins.items():
        if len(listed) != tables[kind].num_rows:
            raise DataError(f"{raw}/provenance.parquet does not fit the rows of {kind}; collect the data again")
    manifest = raw / "manifest.json"
    kinds = read_json(manifest)["kinds"] if manifest.is_file() else {}
    return RawData(
        tables,
        read_refused(raw / "refused.parquet"),
        derived=[kind for kind, about in kinds.items() if about["derived_from"]],
        cut={kind: about["cut"] for kind, about in kinds.items() if about.get("cut")},
        origins=origins,
    )


def validate(raw: RawData, config: ValidateConfig, docs: Path) -> Validated:
    """Check every row of every kind and write the data docs to the folder ``docs``.

    A row that fails any check goes to the quarantine with all its reasons, after the rows that readers refused. So does
    a row of a derived kind of which no row that passed is the source. Checks that only warn are counted.
    """
    filled = {kind: table for kind, table in raw.tables.items() if table.num_rows}
    checks = {kind: checks_for(kind, config, kind in raw.derived) for kind in filled}
    frames: dict[str, pd.DataFrame] = {}
    passed: dict[str, list[dict[str, Any]]] = {}
    for kind, table in filled.items():
        frames[kind] = check_frame(kind, table, config)
        if kind in raw.derived:
            sources = [row for parent in DERIVED_FROM[kind] for row in passed.get(parent, [])]
            ids = {row["id"] for row in derive(kind, sources)}
            frames[kind][SOURCE_PASSED] = frames[kind]["id"].isin(ids).astype(int)
        if any(kind in DERIVED_FROM[child] for child in raw.derived):
            passed[kind] = table.filter(pa.array(passing(frames[kind], checks[kind]))).to_pylist()
    failures = run_suites(frames, checks, docs) if frames else {}
    refused_rows = Counter(row.kind for row in raw.refused)
    raw_rows = {kind: table.num_rows + refused_rows[kind] for kind, table in raw.tables.items()}
    result = Validated({}, list(raw.refused), raw_rows, refused_rows=refused_rows, cut_rows=raw.cut)
    for kind, table in raw.tables.items():
        failed, result.warned_checks[kind] = split_by_severity(failures.get(kind, {}), checks.get(kind, ()))
        reason = {check.column: check.reason for check in checks.get(kind, [])}
        named = {row: [reason[column] for column in columns] for row, columns in failed.items()}
        result.quarantined += quarantine_rows(kind, table, named, raw.origins.get(kind, ()))
        faults = {check.column for check in checks.get(kind, []) if check.is_fault}
        result.left_out[kind] = sum(faults.isdisjoint(columns) for columns in failed.values())
        result.failed_checks[kind] = Counter(
            {check.column: 0 for check in checks.get(kind, ()) if check.severity == "fail"}
        )
        result.failed_checks[kind].update(column for columns in failed.values() for column in columns)
        keep = np.ones(table.num_rows, dtype=bool)
        keep[list(failed)] = False
        result.clean[kind] = table.filter(pa.array(keep, pa.bool_()))
        result.origins[kind] = [origin for origin, kept in zip(raw.origins.get(kind, ()), keep, strict=False) if kept]
    return result

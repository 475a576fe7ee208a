"""Validate raw rows: which are clean, which are quarantined and why, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rlhf_core.config.stages.validate import ValidateConfig
from rlhf_core.data.collection.derived import DERIVED_FROM, derive
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.checks import SOURCE_PASSED, RowCheck, check_frame, checks_for, passing
from rlhf_core.data.validation.expectations import run_suites
from rlhf_core.data.validation.provenance import PROMPT_ONLY, Origins, read_prompt_only, read_provenance
from rlhf_core.data.validation.quarantine import Quarantined, count_refused, quarantine_rows, read_refused
from rlhf_core.data.validation.severity import split_by_severity
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.errors import DataError
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.storage.files import read_json


@dataclass(frozen=True)
class RawData:
    """What the collect stage wrote.

    Attributes:
        rows: The rows, by kind.
        refused: The file of rows that readers refused.
        derived: Kinds that were derived from others.
        of_files: Of kinds that are also derived, how many of the first rows are files' own.
        cut: How many rows of a kind ``collect.limit`` left out.
        origins: The file and line of every row, by kind; empty for rows of no file.
        prompt_only: Ids of derived prompts that come from records which give no other row.
    """

    rows: Mapping[str, StoredRows]
    refused: Path
    derived: Collection[str] = ()
    of_files: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    origins: Mapping[str, Origins] = field(default_factory=dict)
    prompt_only: Collection[str] = ()


@dataclass
class Validated:
    """Clean rows, the quarantine, and counts by kind. Texts stay in the files of ``raw``.

    Attributes:
        clean: The rows that passed.
        reasons: By kind and number of a raw row, why it is quarantined.
        raw_rows: Rows that were checked or refused by readers.
        refused_rows: Those that readers refused.
        left_out: Rows without a fault: over a limit of lengths, or derived from rows that were refused.
        failed_checks: Rows that each check refused; 0 is there for checks that fail the set.
        warned_checks: Rows that stay although they fail a check that only warns.
    """

    raw: RawData
    clean: dict[str, StoredRows] = field(default_factory=dict)
    reasons: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    raw_rows: dict[str, int] = field(default_factory=dict)
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    failed_checks: dict[str, Counter[str]] = field(default_factory=dict)
    warned_checks: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def cut_rows(self) -> Mapping[str, int]:
        """Rows that ``collect.limit`` left out; nothing was checked of them but that readers can read them."""
        return self.raw.cut

    @property
    def quarantined_rows(self) -> dict[str, int]:
        """Rows in the quarantine, by kind."""
        return {kind: self.refused_rows.get(kind, 0) + len(self.reasons.get(kind, ())) for kind in self.raw_rows}

    def quarantined_share(self, kind: str) -> float:
        """Return the share of bad rows among all that were read: a cut row counts as bad as often as a checked one.

        Rows that are ``left_out`` are in the quarantine, but do not count here.
        """
        refused, cut = self.refused_rows.get(kind, 0), self.cut_rows.get(kind, 0)
        checked = self.raw_rows[kind] - refused
        failed = self.quarantined_rows[kind] - refused - self.left_out[kind]
        read = self.raw_rows[kind] + cut
        return (refused + (failed * (checked + cut) / checked if checked else 0)) / read if read else 0.0

    def quarantine(self) -> Iterator[list[Quarantined]]:
        """Yield all quarantined rows in parts: those that readers refused, then those that failed, kind by kind."""
        yield from read_refused(self.raw.refused)
        for kind, reasons in self.reasons.items():
            numbers = sorted(reasons)
            failed = np.zeros(self.raw.rows[kind].stored, dtype=bool)
            failed[numbers] = True
            first = 0
            for table in self.raw.rows[kind].where(failed).parts() if numbers else ():
                part = numbers[first : first + table.num_rows]
                yield quarantine_rows(kind, table, part, reasons, self.raw.origins.get(kind))
                first += table.num_rows


def read_raw(raw: Path) -> RawData:
    """Open the folder ``data/raw``; ``DataError`` when a file is missing or has other columns or another length."""
    rows = {kind: StoredRows.of_file(kind, raw / kind / "data.parquet") for kind in ROW_TYPES}
    origins = read_provenance(raw / "provenance.parquet")
    for kind, listed in origins.items():
        if len(listed) != rows[kind].num_rows:
            raise DataError(f"{raw}/provenance.parquet does not fit the rows of {kind}; collect the data again")
    manifest = raw / "manifest.json"
    kinds = read_json(manifest)["kinds"] if manifest.is_file() else {}
    return RawData(
        rows,
        raw / "refused.parquet",
        derived=[kind for kind, about in kinds.items() if about["derived_from"]],
        of_files={
            kind: about["rows"] - about["derived_rows"] for kind, about in kinds.items() if "derived_rows" in about
        },
        cut={kind: about["cut"] for kind, about in kinds.items() if about.get("cut")},
        origins=origins,
        prompt_only=read_prompt_only(raw / PROMPT_ONLY),
    )


def validate(raw: RawData, config: ValidateConfig, docs: Path) -> Validated:
    """Check every row of every kind and write the data docs to the folder ``docs``.

    A row that fails any check goes to the quarantine with all its reasons, after the rows that readers refused. So does
    a row of a derived kind of which no row that passed is the source, nor a record that gives nothing but a prompt.
    Checks that only warn are counted.
    """
    filled = {kind: rows for kind, rows in raw.rows.items() if rows.num_rows}
    checks = {kind: checks_for(kind, config, kind in raw.derived) for kind in filled}
    frames: dict[str, pd.DataFrame] = {}
    derivable: dict[str, set[str]] = {kind: set() for kind in raw.derived}
    if "prompts" in derivable:
        derivable["prompts"].update(raw.prompt_only)
    with progress(sum(rows.num_rows for rows in filled.values()), "checking rows") as bar:
        for kind, rows in filled.items():
            frames[kind] = check_frame(kind, _advancing(rows, bar), config)
            if kind in raw.derived:
                own = np.arange(len(frames[kind])) < raw.of_files.get(kind, 0)
                frames[kind][SOURCE_PASSED] = (own | frames[kind]["id"].isin(derivable.pop(kind))).astype(int)
            _derive_ids(rows, passing(frames[kind], checks[kind]), raw.origins.get(kind), derivable)
    failures = run_suites(frames, checks, docs) if frames else {}
    refused_rows = count_refused(raw.refused)
    result = Validated(raw, refused_rows=refused_rows)
    for kind, rows in raw.rows.items():
        result.raw_rows[kind] = rows.num_rows + refused_rows[kind]
        _take_failures(result, kind, failures.get(kind, {}), checks.get(kind, []))
    return result


def _advancing(rows: StoredRows, bar: Progress) -> Iterator[pa.Table]:
    for table in rows.parts():
        yield table
        bar.advance(table.num_rows)


def _derive_ids(
    rows: StoredRows, passed: npt.NDArray[np.bool_], origins: Origins | None, ids: Mapping[str, set[str]]
) -> None:
    """Add the ids of the rows of each derived kind that come from rows that passed."""
    children = [kind for kind in ids if rows.kind in DERIVED_FROM[kind]]
    start = 0
    for parents in _whole_records(rows, origins) if children else ():
        for kind in children:
            derive(kind, parents, ids[kind], passed[start : start + len(parents)].tolist())
        start += len(parents)


def _whole_records(rows: StoredRows, origins: Origins | None) -> Iterator[list[dict[str, Any]]]:
    """Yield rows in parts, of files with their path and position; all rows of one record are in one part."""
    waiting: list[dict[str, Any]] = []
    number = 0
    for table in rows.parts():
        part = table.to_pylist()
        if origins is not None:
            for row in part:
                row |= {"path": origins[number].source, "position": origins[number].position}
                number += 1
        waiting += part
        border = _last_record(waiting) if origins is not None else len(waiting)
        yield waiting[:border]
        waiting = waiting[border:]
    yield waiting


def _last_record(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return where the last record of ``rows`` begins."""
    last = rows[-1]["path"], rows[-1]["position"]
    return next((i for i in range(len(rows), 0, -1) if (rows[i - 1]["path"], rows[i - 1]["position"]) != last), 0)


def _take_failures(
    result: Validated, kind: str, failures: Mapping[int, Sequence[str]], checks: Sequence[RowCheck]
) -> None:
    """Quarantine the rows of a kind that failed, by their numbers with the columns of the checks."""
    failed, result.warned_checks[kind] = split_by_severity(failures, checks)
    reason = {check.column: check.reason for check in checks}
    faults = {check.column for check in checks if check.is_fault}
    rows = result.raw.rows[kind]
    result.reasons[kind] = {row: [reason[column] for column in columns] for row, columns in failed.items()}
    result.left_out[kind] = sum(faults.isdisjoint(columns) for columns in failed.values())
    result.failed_checks[kind] = Counter({check.column: 0 for check in checks if check.severity == "fail"})
    result.failed_checks[kind].update(column for columns in failed.values() for column in columns)
    keep = np.ones(rows.stored, dtype=bool)
    keep[list(failed)] = False
    result.clean[kind] = rows.where(keep)

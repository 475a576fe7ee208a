"""Validate raw rows: which are clean, which are quarantined and why, and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rlhf_core.data.collection.rows import DERIVED_FROM, derive, whole_records
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.columns import copies, label_agreement, read_columns
from rlhf_core.data.validation.stored_rows import (
    PROMPT_ONLY,
    StoredRows,
    count_refused,
    read_prompt_only,
    read_provenance,
    read_refused,
)
from rlhf_core.data.validation.suites import (
    COPIES,
    NOT_DERIVED,
    NOT_DUPLICATE,
    ROWS,
    SOURCE_PASSED,
    Checkpoints,
    SuiteRule,
    Suites,
    Verdicts,
)
from rlhf_core.errors import DataError
from rlhf_core.runtime.progress import Progress, progress
from rlhf_core.storage.files import read_json


@dataclass(frozen=True)
class RawData:
    """What the collect stage wrote.

    Attributes:
        refused: The file of rows that readers refused.
        of_files: Of kinds that are also derived, how many of the first rows are files' own.
        cut: How many rows of a kind ``collect.limit`` left out.
        prompt_only: Ids of derived prompts that come from records which give no other row.
    """

    rows: Mapping[str, StoredRows]
    refused: Path
    derived: Collection[str] = ()
    of_files: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    prompt_only: Collection[str] = ()


@dataclass
class CheckedKind:
    """The rows of a kind, and what the rules say of them.

    Attributes:
        raw: The rows that were checked. Texts stay in their file.
        refused: How many more readers refused.
        cut: How many more ``collect.limit`` left out.
        frame: The columns that the expectations are about; none where there is no row.
        reasons: By number of a raw row, why it is quarantined.
        left_out: Rows in the quarantine without a fault: over a limit of lengths, derived from rows that were refused,
            or found in the whole set.
        failed: Rows that each rule refused; 0 is there for rules that fail the set.
        warned: Rows that stay although they break a rule that only warns.
        must_hold: The rules that fail the set where a row, or the table, breaks them.
    """

    raw: StoredRows
    refused: int = 0
    cut: int = 0
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    left_out: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    must_hold: list[str] = field(default_factory=list)
    verdicts: Verdicts = field(default_factory=dict)

    @property
    def clean(self) -> StoredRows:
        """The rows that passed."""
        return self.raw.where(~np.isin(self.raw.numbers, list(self.reasons)))

    @property
    def raw_rows(self) -> int:
        """Rows that were checked or refused by readers."""
        return self.raw.num_rows + self.refused

    @property
    def quarantined(self) -> int:
        """Rows in the quarantine."""
        return self.refused + len(self.reasons)

    @property
    def quarantined_share(self) -> float:
        """The share of bad rows among all that were read: a cut row counts as bad as often as a checked one.

        Rows that are ``left_out`` are in the quarantine, but do not count here.
        """
        checked, failed, read = self.raw.num_rows, len(self.reasons) - self.left_out, self.raw_rows + self.cut
        return (self.refused + (failed * (checked + self.cut) / checked if checked else 0)) / read if read else 0.0

    def place(self, row: int) -> str:
        """Return what messages call a row: its file and line, or its id."""
        return RowFinding("", self.raw.kind, "", **self.raw.origin(row), id=str(self.frame["id"].iat[row])).where

    def passing(self, verdicts: Verdicts) -> npt.NDArray[np.bool_]:
        """Return by row whether it breaks none of the rules that do more than warn."""
        passed = np.ones(len(self.frame), dtype=bool)
        for rule, verdict in verdicts.items():
            if rule.severity != "warn" and verdict.rows is not None:
                passed[verdict.rows] = False
        return passed

    def take(self, verdicts: Verdicts, found: Mapping[str, Mapping[int, str]] | None = None) -> None:
        """Count the rows that break rules, and quarantine those that a rule refuses, with all their reasons.

        A row that is refused does not count under rules that only warn.

        Args:
            found: What was found by rules about the whole set, by rule and row: the reasons that the quarantine states.
        """
        refused: dict[int, dict[str, SuiteRule]] = {}
        warned: dict[str, set[int]] = {}
        for rule, verdict in verdicts.items():
            rows = verdict.rows.tolist() if verdict.rows is not None else []
            table_broken = verdict.rows is None and not verdict.passed
            if found is not None:
                (self.warned if rule.severity == "warn" else self.failed).setdefault(rule.name, 0)
            if rule.severity == "warn":
                warned.setdefault(rule.name, set()).update(rows, [-1] if table_broken else ())
                continue
            if rule.severity == "fail" or verdict.rows is None:
                self.must_hold.append(rule.name)
                self.failed[rule.name] += table_broken
            for row in rows:
                refused.setdefault(row, {}).setdefault(rule.name, rule)
        for row, rules in sorted(refused.items()):
            self.failed.update(rules.keys())
            self.reasons[row] = [found[name][row] if found else rule.reason for name, rule in rules.items()]
            self.left_out += found is not None or not any(rule.is_fault for rule in rules.values())
        counts = {name: len(rows - refused.keys()) for name, rows in warned.items()}
        self.warned.update({name: count for name, count in counts.items() if count})
        self.verdicts |= verdicts

    def quarantine(self) -> Iterator[list[RowFinding]]:
        """Yield the rows that rules refused in parts."""
        numbers = iter(sorted(self.reasons))
        for table in self.raw.where(np.isin(self.raw.numbers, list(self.reasons))).parts() if self.reasons else ():
            yield [self._quarantined(row, next(numbers)) for row in table.to_pylist()]

    def _quarantined(self, row: Mapping[str, Any], number: int) -> RowFinding:
        first, *more = self.reasons[number]
        text = json.dumps(row, ensure_ascii=False, default=str)
        return RowFinding("", self.raw.kind, first, **self.raw.origin(number), id=str(row["id"]), row=text, more=more)


@dataclass
class Validated:
    """Clean rows, the quarantine, and counts by kind.

    Attributes:
        agreement: Of the labels of pairs that occur more than once; see :func:`label_agreement`.
    """

    raw: RawData
    checkpoints: Checkpoints
    kinds: dict[str, CheckedKind] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def clean(self) -> dict[str, StoredRows]:
        """The rows that passed, by kind."""
        return {kind: checked.clean for kind, checked in self.kinds.items()}

    def ask(self, kind: str, page: str) -> Verdicts:
        """Ask the expectations of a kind whose columns are there now; see :meth:`Checkpoints.run`."""
        return self.checkpoints.run(kind, self.kinds[kind].frame, page, self.kinds[kind].place)

    def quarantine(self) -> Iterator[list[RowFinding]]:
        """Yield all quarantined rows in parts: those that readers refused, then those that failed, kind by kind."""
        yield from read_refused(self.raw.refused)
        for checked in self.kinds.values():
            yield from checked.quarantine()


def read_raw(raw: Path) -> RawData:
    """Open the folder ``data/raw``; ``DataError`` when a file is missing or has other columns or another length."""
    rows = {kind: StoredRows.of_file(kind, raw / kind / "data.parquet") for kind in ROW_TYPES}
    origins = read_provenance(raw / "provenance.parquet")
    for kind, listed in origins.items():
        if len(listed) != rows[kind].num_rows:
            raise DataError(f"{raw}/provenance.parquet does not fit the rows of {kind}; collect the data again")
        rows[kind] = replace(rows[kind], origins=listed)
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
        prompt_only=read_prompt_only(raw / PROMPT_ONLY),
    )


def validate(raw: RawData, suites: Suites, folder: Path) -> Validated:
    """Ask the expectations of every kind of its rows; rules about the whole set come after it.

    A row that breaks any rule goes to the quarantine with all its reasons, after the rows that readers refused. So does
    a row of a derived kind of which no row that passed is the source, nor a record that gives nothing but a prompt.
    Rules that only warn are counted.

    Args:
        folder: Holds the texts of the columns while the result is used.
    """
    result, refused = Validated(raw, Checkpoints(suites)), count_refused(raw.refused)
    derivable: dict[str, set[str]] = {kind: set() for kind in raw.derived}
    if "prompts" in derivable:
        derivable["prompts"].update(raw.prompt_only)
    with progress(sum(rows.num_rows for rows in raw.rows.values()), "checking rows") as bar:
        for kind, rows in raw.rows.items():
            result.kinds[kind] = checked = CheckedKind(rows, refused[kind], raw.cut.get(kind, 0))
            if not rows.num_rows:
                continue
            frame, hashes = read_columns(kind, _advancing(rows, bar), folder / f"{kind}.arrow")
            if kind == "preferences":
                result.agreement = label_agreement(hashes, frame["margin"].array.tolist())
            checked.frame = frame
            verdicts = result.ask(kind, ROWS)
            copied = copies(hashes.column("content"), checked.passing(verdicts))
            ids = frame["id"].array
            copied_from = {row: f"a copy of {ids[other]}" for row, other in copied.items()}
            frame[NOT_DUPLICATE] = found_column(len(frame), copied_from)
            if kind in raw.derived:
                own = np.arange(len(frame)) < raw.of_files.get(kind, 0)
                lost = np.flatnonzero(~(own | frame["id"].isin(derivable.pop(kind)).to_numpy()))
                frame[SOURCE_PASSED] = found_column(len(frame), dict.fromkeys(lost.tolist(), NOT_DERIVED))
            verdicts |= result.ask(kind, COPIES)
            _derive_ids(rows, checked.passing(verdicts), derivable)
            checked.take(verdicts)
    return result


def found_column(rows: int, findings: Mapping[int, str]) -> pd.Series:
    """Return a column with what a rule about the set found of each row, null where it found nothing."""
    values = np.full(rows, None, dtype=object)
    values[list(findings)] = list(findings.values())
    return pd.Series(values, dtype="str")


def _advancing(rows: StoredRows, bar: Progress) -> Iterator[pa.Table]:
    for table in rows.parts():
        yield table
        bar.advance(table.num_rows)


def _derive_ids(rows: StoredRows, passed: npt.NDArray[np.bool_], ids: Mapping[str, set[str]]) -> None:
    """Add the ids of the rows of each derived kind that come from rows that passed."""
    children = [kind for kind in ids if rows.kind in DERIVED_FROM[kind]]
    start = 0
    for parents in whole_records(_with_places(rows)) if children else ():
        for kind in children:
            derive(kind, parents, ids[kind], passed[start : start + len(parents)].tolist())
        start += len(parents)


def _with_places(rows: StoredRows) -> Iterator[list[dict[str, Any]]]:
    """Yield rows in parts, those of files with their ``path`` and ``position``."""
    numbers = iter(rows.numbers)
    for table in rows.parts():
        part = table.to_pylist()
        for row in part if rows.origins is not None else ():
            origin = rows.origin(next(numbers))
            row |= {"path": origin["source"], "position": origin["position"]}
        yield part

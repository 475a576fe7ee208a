"""Validate raw rows: which are clean, which are quarantined and why, and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rlhf_core.config.data import Severity
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
    SET,
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
        rows: The rows, by kind.
        refused: The file of rows that readers refused.
        derived: Kinds that were derived from others.
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
class Validated:
    """Clean rows, the quarantine, and counts by kind. Texts stay in the files of ``raw``.

    Attributes:
        clean: The rows that passed.
        reasons: By kind and number of a raw row, why it is quarantined.
        raw_rows: Rows that were checked or refused by readers.
        refused_rows: Those that readers refused.
        left_out: Rows without a fault: over a limit of lengths, or derived from rows that were refused.
        failed_checks: Rows that each rule refused; 0 is there for rules that fail the set.
        warned_checks: Rows that stay although they break a rule that only warns.
        must_hold: By kind, the rules that fail the set where a row, or the table, breaks them.
        verdicts: By kind, what each expectation about rows by themselves, copies and derivation says.
        frames: By kind, the columns that its expectations are about.
        checkpoints: What asked the expectations.
        agreement: Of the labels of pairs that occur more than once; see :func:`label_agreement`.
    """

    raw: RawData
    clean: dict[str, StoredRows] = field(default_factory=dict)
    reasons: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    raw_rows: dict[str, int] = field(default_factory=dict)
    refused_rows: Mapping[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    failed_checks: dict[str, Counter[str]] = field(default_factory=dict)
    warned_checks: dict[str, Counter[str]] = field(default_factory=dict)
    must_hold: dict[str, list[str]] = field(default_factory=dict)
    verdicts: dict[str, Verdicts] = field(default_factory=dict)
    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    checkpoints: Checkpoints | None = None
    agreement: dict[str, float] = field(default_factory=dict)

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

    def severity(self, kind: str, rule: str) -> Severity | None:
        """Return what becomes of rows of a kind that break a rule; None where no expectation asks for it."""
        return self.checkpoints.suites.severity(kind, rule) if self.checkpoints is not None else None

    def passing(self, kind: str, verdicts: Verdicts) -> npt.NDArray[np.bool_]:
        """Return by row of a kind whether it breaks none of the rules that do more than warn."""
        passed = np.ones(len(self.frames[kind]), dtype=bool)
        for rule, verdict in verdicts.items():
            if rule.severity != "warn" and verdict.rows is not None:
                passed[verdict.rows] = False
        return passed

    def take(self, kind: str, verdicts: Verdicts) -> dict[int, list[SuiteRule]]:
        """Count the rows that break rules, and return those that are refused, each with the rules that refuse it.

        A row that is refused does not count under rules that only warn.
        """
        refused: dict[int, dict[str, SuiteRule]] = {}
        warned: dict[str, set[int]] = {}
        failed = self.failed_checks.setdefault(kind, Counter())
        for rule, verdict in verdicts.items():
            rows = verdict.rows.tolist() if verdict.rows is not None else []
            if rule.severity == "warn":
                of_table = [-1] if verdict.rows is None and not verdict.passed else []
                warned.setdefault(rule.name, set()).update(rows, of_table)
                continue
            if rule.severity == "fail" or verdict.rows is None:
                self.must_hold.setdefault(kind, []).append(rule.name)
                failed[rule.name] += verdict.rows is None and not verdict.passed
            for row in rows:
                refused.setdefault(row, {}).setdefault(rule.name, rule)
        for rules in refused.values():
            failed.update(rules.keys())
        counts = {name: len(rows - refused.keys()) for name, rows in warned.items()}
        self.warned_checks.setdefault(kind, Counter()).update({name: n for name, n in counts.items() if n})
        return {row: list(rules.values()) for row, rules in sorted(refused.items())}

    def quarantine(self) -> Iterator[list[RowFinding]]:
        """Yield all quarantined rows in parts: those that readers refused, then those that failed, kind by kind."""
        yield from read_refused(self.raw.refused)
        for kind, reasons in self.reasons.items():
            raw, numbers = self.raw.rows[kind], sorted(reasons)
            failed = np.zeros(raw.stored, dtype=bool)
            failed[numbers] = True
            waiting = iter(numbers)
            for table in raw.where(failed).parts() if numbers else ():
                # The numbers come second: zip would take one of them before it finds that there is no further row.
                listed = zip(table.to_pylist(), waiting, strict=False)
                yield [_quarantined(raw, row, number, reasons[number]) for row, number in listed]


def _quarantined(raw: StoredRows, row: Mapping[str, Any], number: int, reasons: Sequence[str]) -> RowFinding:
    text = json.dumps(row, ensure_ascii=False, default=str)
    return RowFinding("", raw.kind, reasons[0], **raw.origin(number), id=str(row["id"]), row=text, more=reasons[1:])


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
    result = Validated(raw, refused_rows=count_refused(raw.refused), checkpoints=Checkpoints(suites))
    filled = {kind: rows for kind, rows in raw.rows.items() if rows.num_rows}
    derivable: dict[str, set[str]] = {kind: set() for kind in raw.derived}
    if "prompts" in derivable:
        derivable["prompts"].update(raw.prompt_only)
    with progress(sum(rows.num_rows for rows in filled.values()), "checking rows") as bar:
        for kind, rows in raw.rows.items():
            result.raw_rows[kind] = rows.num_rows + result.refused_rows[kind]
            verdicts: Verdicts = {}
            if kind in filled:
                frame, hashes = read_columns(kind, _advancing(rows, bar), folder / f"{kind}.arrow")
                if kind == "preferences":
                    result.agreement = label_agreement(hashes, frame["margin"].array.tolist())
                result.frames[kind] = frame
                verdicts = _ask(result, kind, ROWS)
                copied = copies(hashes.column("content"), result.passing(kind, verdicts))
                ids = frame["id"].array
                copied_from = {row: f"a copy of {ids[other]}" for row, other in copied.items()}
                frame[NOT_DUPLICATE] = found_column(len(frame), copied_from)
                if kind in raw.derived:
                    own = np.arange(len(frame)) < raw.of_files.get(kind, 0)
                    lost = np.flatnonzero(~(own | frame["id"].isin(derivable.pop(kind)).to_numpy()))
                    frame[SOURCE_PASSED] = found_column(len(frame), dict.fromkeys(lost.tolist(), NOT_DERIVED))
                verdicts |= _ask(result, kind, COPIES)
                _derive_ids(rows, result.passing(kind, verdicts), derivable)
            _take_verdicts(result, kind, verdicts)
    return result


def found_column(rows: int, findings: Mapping[int, str]) -> pd.Series:
    """Return a column with what a rule about the set found of each row, null where it found nothing."""
    values = np.full(rows, None, dtype=object)
    values[list(findings)] = list(findings.values())
    return pd.Series(values, dtype="str")


def _ask(result: Validated, kind: str, part: str) -> Verdicts:
    checkpoints, frame, raw = result.checkpoints, result.frames[kind], result.raw.rows[kind]
    assert checkpoints is not None

    def where(row: int) -> str:
        return RowFinding("", kind, "", **raw.origin(row), id=str(frame["id"].iat[row])).where

    return checkpoints.run(kind, frame, part, where)


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


def _take_verdicts(result: Validated, kind: str, verdicts: Verdicts) -> None:
    """Quarantine the rows of a kind that break rules which do more than warn, with their reasons."""
    result.verdicts[kind] = verdicts
    reasons = result.take(kind, verdicts)
    result.reasons[kind] = {row: [rule.reason for rule in rules] for row, rules in reasons.items()}
    result.left_out[kind] = sum(not any(rule.is_fault for rule in rules) for rules in reasons.values())
    rows = result.raw.rows[kind]
    result.clean[kind] = rows.where(~np.isin(np.arange(rows.stored), list(reasons)))


def take_set_verdicts(result: Validated, kind: str, reasons_of_rules: Mapping[str, Mapping[int, str]]) -> None:
    """Ask the expectations about the whole set, and quarantine the clean rows of a kind that these refuse.

    Args:
        reasons_of_rules: By rule and number of a raw row, what was found: the reason that the quarantine states.
    """
    verdicts = {rule: verdict for rule, verdict in _ask(result, kind, SET).items() if rule.name in reasons_of_rules}
    reasons = result.take(kind, verdicts)
    for rule in verdicts:
        counts = result.warned_checks if rule.severity == "warn" else result.failed_checks
        counts[kind].setdefault(rule.name, 0)
    for row, rules in reasons.items():
        result.reasons[kind][row] = [reasons_of_rules[rule.name][row] for rule in rules]
    result.left_out[kind] += len(reasons)
    clean = result.clean[kind]
    result.clean[kind] = clean.where(~np.isin(clean.numbers, list(reasons)))

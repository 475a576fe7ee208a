"""Rows of a source as they are, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa

# The rule of rows that a reader could not use; all others are those of rlhf_core.config.data.
READABLE = "readable"
# Reasons may quote the row: of more than so many different ones, the others are counted together.
MOST_REASONS = 1000
OTHER_REASONS = "other reasons"
FIRST_POSITIONS = 8
# The counters of RowCounts.
BY_WORD = ("dropped", "unused", "noticed")
TEXT = pa.string()
# Findings as they are stored: of readers, of rows in the quarantine, of rules about the whole set.
REFUSED_SCHEMA = pa.schema(
    {"kind": TEXT, "source": TEXT, "position": pa.int64(), "reason": TEXT, "row": TEXT}
)
QUARANTINE_SCHEMA = pa.schema(
    {
        "kind": TEXT,
        "id": TEXT,
        "source": TEXT,
        "position": pa.int64(),
        "reasons": pa.list_(TEXT),
        "row": TEXT,
    }
)
FINDINGS_SCHEMA = pa.schema(
    dict.fromkeys(("rule", "severity", "kind", "id", "source"), TEXT)
    | {"position": pa.int64(), "reason": TEXT, "other": TEXT, "similarity": pa.float64()}
)


@dataclass(frozen=True)
class Record:
    """One row of a file, as it is.

    Attributes:
        position: Counted from 1: the line in jsonl and csv (of a row of several lines the first),
            the row elsewhere.
        value: The parsed row, or its raw text if it could not be parsed.
        problem: Why the row could not be parsed.
    """

    position: int
    value: Any
    problem: str = ""


@dataclass(frozen=True)
class RowFinding:
    """Row X broke rule Y, because.

    Attributes:
        rule: ``READABLE``, or a rule of validation.
        kind: One of ``ROW_TYPES``.
        source: The file that it was read from, as params.yaml spells it; None for rows of no file.
        position: The line or number of the row there.
        id: The row's id; empty if the record never became a row.
        number: Its place among the rows of its kind that the rule was checked on, where these are
            numbered.
        severity: What follows: ``refuse``, ``warn`` or ``fail``.
        row: The content as JSON, where it is kept.
        other: What it resembles: the id of another row, or file and line of an evaluation prompt.
        similarity: The estimated Jaccard similarity, for rules that use it.
        more: Reasons of further rules that the row broke.
    """

    rule: str
    kind: str
    reason: str
    source: str | None = None
    position: int | None = None
    id: str = ""
    number: int | None = None
    severity: str = "refuse"
    row: str = ""
    other: str = ""
    similarity: float | None = None
    more: Sequence[str] = ()

    @property
    def reasons(self) -> list[str]:
        """All that is wrong with the row."""
        return [self.reason, *self.more]

    @property
    def where(self) -> str:
        """The file and line of the row, or its id where it is from no file."""
        return self.id if self.source is None else f"{self.source}:{self.position}"


def findings_table(findings: Sequence[RowFinding], schema: pa.Schema) -> pa.Table:
    """Return findings as they are stored, with the columns of ``schema``."""
    rows = []
    for finding in findings:
        rows.append({name: getattr(finding, name) for name in schema.names})
    return pa.Table.from_pylist(rows, schema=schema)


@dataclass
class ReasonCount:
    """How many rows broke a rule for one reason, and where the first of them are.

    Attributes:
        first: The finding of the first of them.
        positions: Of the first eight.
    """

    reason: str
    first: RowFinding
    rows: int = 0
    positions: list[int] = field(default_factory=list)


class ReasonCounts(dict[str, ReasonCount]):
    """Findings counted by their reasons."""

    @classmethod
    def of(cls, findings: Iterable[RowFinding]) -> ReasonCounts:
        """Count some findings."""
        counts = cls()
        for finding in findings:
            counts.add(finding)
        return counts

    def add(self, finding: RowFinding) -> None:
        """Count one finding."""
        reason = finding.reason
        if reason not in self and len(self) >= MOST_REASONS:
            reason = OTHER_REASONS
        count = self.setdefault(reason, ReasonCount(reason, finding))
        count.rows += 1
        if finding.position is not None and len(count.positions) < FIRST_POSITIONS:
            count.positions.append(finding.position)

    def commonest(self) -> list[ReasonCount]:
        """Return the reasons, commonest first, equally common ones as they were found."""
        return sorted(self.values(), key=lambda count: -count.rows)


@dataclass
class RowCounts:
    """What became of the records of a source, as far as it is read.

    ``records + expanded`` is the number of ``kept``, ``refused`` and ``dropped`` ones, and of those
    that were ``cut``. Messages that are joined into a tree are one record.

    Attributes:
        source: The file, URL or hub id, as params.yaml spells it.
        sha256: Of its bytes; empty for a hub data set.
        revision: The commit of a hub data set.
        expanded: Rows beyond one per record, such as the pairs of a ranking.
        kept: Rows that are used.
        refused: Records, or rows, with a fault; ``reasons`` says which.
        dropped: By reason, records without a fault that give no row, such as ties.
        cut: Rows that a limit or cap left out.
        unread: Rows of a hub data set on top of ``records``; None where the hub does not say how
            many.
        unused: By column, the rows with a value there that is not read.
        noticed: By what was noticed of rows that are used, such as an end marker that was taken
            off, how many.
    """

    source: str
    kind: str
    format: str
    sha256: str = ""
    revision: str = ""
    records: int = 0
    expanded: int = 0
    kept: int = 0
    refused: int = 0
    cut: int = 0
    unread: int | None = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)
    reasons: ReasonCounts = field(default_factory=ReasonCounts)

    def refuse(self, finding: RowFinding, was_kept: bool = False) -> None:
        """Count a refused row, which may have been counted as kept before."""
        self.refused += 1
        self.kept -= was_kept
        self.reasons.add(finding)

    def cut_to(self, kept: int) -> None:
        """Count as cut what is more than ``kept`` rows."""
        self.cut += max(self.kept - kept, 0)
        self.kept = min(self.kept, kept)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as the manifest of ``data/raw`` has them, without reasons."""
        values = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("kind", "kept", "reasons")
        }
        return values | {"rows": self.kept} | {name: dict(getattr(self, name)) for name in BY_WORD}

    @classmethod
    def of_manifest(cls, kind: str, file: Mapping[str, Any]) -> RowCounts:
        """Return the counts that the manifest of ``data/raw`` says of a file of ``kind``."""
        known = {f.name for f in fields(cls)} - {"kind", "kept", "reasons"}
        values = {name: value for name, value in file.items() if name in known}
        values |= {name: Counter(file.get(name, {})) for name in BY_WORD}
        return cls(kind=kind, kept=file["rows"], **values)

"""Findings of the rules about the whole set, with the id, file and line of each row: ``data/card/findings.parquet``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rlhf_core.config.stages.validate import ValidateConfig
from rlhf_core.data.validation.set_rules.set_rows import SetBreach
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.data.validation.tables import Validated

FINDINGS_SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("rule", "severity", "kind", "id", "source")],
        ("position", pa.int64()),
        ("reason", pa.string()),
        ("other", pa.string()),
        ("similarity", pa.float64()),
    ]
)


@dataclass(frozen=True)
class RuleFinding:
    """A row that breaks a rule about the set; ``source`` and ``position`` are None for rows of no file."""

    rule: str
    severity: str
    kind: str
    id: str
    source: str | None
    position: int | None
    reason: str
    other: str
    similarity: float | None


def named_findings(breaches: Sequence[SetBreach], validated: Validated, config: ValidateConfig) -> list[RuleFinding]:
    """Name the rows of ``breaches``, which are positions among the clean rows of their kinds."""
    findings: list[RuleFinding] = []
    named = {
        kind: (clean.numbers, _ids(clean, {breach.row for breach in breaches if breach.kind == kind}))
        for kind, clean in validated.clean.items()
    }
    for breach in breaches:
        numbers, ids = named[breach.kind]
        origins = validated.raw.origins.get(breach.kind)
        origin = origins[int(numbers[breach.row])] if origins is not None else None
        findings.append(
            RuleFinding(
                breach.rule,
                config.severity(breach.rule),
                breach.kind,
                ids[breach.row],
                origin.source if origin else None,
                origin.position if origin else None,
                breach.reason,
                breach.other,
                breach.similarity,
            )
        )
    return findings


def _ids(clean: StoredRows, rows: Collection[int]) -> dict[int, str]:
    """Return the ids of the rows at these positions."""
    chosen = np.zeros(clean.num_rows, dtype=bool)
    chosen[list(rows)] = True
    ids = (str(row_id) for part in clean.where(chosen).parts(["id"]) for row_id in part.column("id").to_pylist())
    return dict(zip(sorted(rows), ids, strict=True)) if rows else {}


def findings_table(findings: Sequence[RuleFinding]) -> pa.Table:
    """Return the findings as they are stored."""
    return pa.Table.from_pylist([vars(finding) for finding in findings], schema=FINDINGS_SCHEMA)

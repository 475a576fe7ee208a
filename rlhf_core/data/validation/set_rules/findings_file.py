"""Findings of the rules about the whole set, with the id, file and line of each row: ``data/card/findings.parquet``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rlhf_core.config.validate import ValidateConfig
from rlhf_core.data.validation.provenance import Origin
from rlhf_core.data.validation.set_rules.set_rows import SetBreach

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
class Finding:
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


def named_findings(
    breaches: Sequence[SetBreach],
    clean: Mapping[str, pa.Table],
    origins: Mapping[str, Sequence[Origin]],
    config: ValidateConfig,
) -> list[Finding]:
    """Name the rows of ``breaches``, which are positions in the tables of ``clean``."""
    ids = {kind: table.column("id") for kind, table in clean.items()}
    findings = []
    for breach in breaches:
        origin = origins[breach.kind][breach.row] if origins.get(breach.kind) else None
        findings.append(
            Finding(
                breach.rule,
                config.severity(breach.rule),
                breach.kind,
                str(ids[breach.kind][breach.row]),
                origin.source if origin else None,
                origin.position if origin else None,
                breach.reason,
                breach.other,
                breach.similarity,
            )
        )
    return findings


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return the findings as they are stored."""
    return pa.Table.from_pylist([vars(finding) for finding in findings], schema=FINDINGS_SCHEMA)

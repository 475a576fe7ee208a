"""Findings of the rules about the whole set, with the id, file and line of each row: ``data/card/findings.parquet``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.validation.suites import Suites
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


def named_findings(findings: Sequence[RowFinding], validated: Validated, suites: Suites) -> list[RowFinding]:
    """Name the rows of ``findings``, which are numbered among the clean rows of their kinds, and say what follows.

    What no suite asks for is left out.
    """
    named: list[RowFinding] = []
    for kind, clean in validated.clean.items():
        of_kind = [(finding, suites.severity(kind, finding.rule)) for finding in findings if finding.kind == kind]
        numbers, origins = clean.numbers, validated.raw.origins.get(kind)
        ids = validated.frames[kind]["id"] if of_kind else ()
        for finding, severity in of_kind:
            if severity is not None and finding.number is not None:
                number = int(numbers[finding.number])
                origin = vars(origins[number]) if origins is not None else {}
                named.append(replace(finding, number=number, id=str(ids[number]), severity=severity, **origin))
    order = {rule: place for place, rule in enumerate(dict.fromkeys(finding.rule for finding in findings))}
    return sorted(named, key=lambda finding: order[finding.rule])


def findings_table(findings: Sequence[RowFinding]) -> pa.Table:
    """Return the findings as they are stored."""
    rows = [{name: getattr(finding, name) for name in FINDINGS_SCHEMA.names} for finding in findings]
    return pa.Table.from_pylist(rows, schema=FINDINGS_SCHEMA)

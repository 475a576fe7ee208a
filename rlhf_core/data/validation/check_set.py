"""The rules about whole sets of rows, checked one after another, and the file of what they found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.collection.rows import FileRows
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.validation.set_rows import (
    FIRST_TURN_RULE,
    LANGUAGE,
    PREFIX_RULE,
    SetRows,
    languages,
    prefix_leakage,
)
from rlhf_core.data.validation.similar_rows import (
    CONTAMINATION,
    NEAR_DUPLICATES,
    SIMILAR_PROMPTS,
    EvaluationOverlap,
    contamination,
    near_duplicates,
    similar_prompts,
)
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.data.validation.suites import Suites
from rlhf_core.data.validation.tables import Validated, found_column, take_set_verdicts


@dataclass
class SetFindings:
    """What the rules about the whole set found in the clean rows.

    Attributes:
        breaches: Rows that break a rule, in the order of rules and rows.
        checked: By kind, the rules that its rows were checked by.
        counts: By kind, further counts for ``metrics/data.json``.
        evaluation: The evaluation files and how much of them was met.
        languages: By kind, how many rows are of each language.
    """

    breaches: list[RowFinding] = field(default_factory=list)
    checked: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluation: list[EvaluationOverlap] = field(default_factory=list)
    languages: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, breaches: Collection[RowFinding], kinds: Collection[str], *rules: str) -> None:
        """Add what ``rules`` found in the rows of ``kinds``."""
        self.breaches += breaches
        for kind in kinds:
            self.checked.setdefault(kind, []).extend(rules)


def check_set(
    clean: Mapping[str, StoredRows],
    config: ValidateConfig,
    suites: Suites,
    derived: Collection[str] = (),
    evaluation: Sequence[FileRows] = (),
) -> SetFindings:
    """Check the clean rows of all kinds by the rules about the whole set.

    Args:
        derived: Kinds whose rows are not compared with each other: they repeat those that they come from.
        evaluation: The evaluation files, read as prompts.
    """
    rows, findings = SetRows(clean, config.seed, config.split), SetFindings()
    filled = [kind for kind, stored in clean.items() if stored.num_rows]
    prompted = [kind for kind in filled if "prompt" in CONTENT_FIELDS[kind]]
    leaked, findings.counts = prefix_leakage(rows)
    findings.add(leaked, prompted, PREFIX_RULE, FIRST_TURN_RULE)
    severities = {suites.severity(kind, rule) for kind in filled for rule in (NEAR_DUPLICATES, SIMILAR_PROMPTS)}
    decides = not severities <= {"warn", None}
    if config.near_duplicates.searches(max((clean[kind].num_rows for kind in filled), default=0), decides):
        given = [kind for kind in filled if kind not in derived]
        duplicates, compared = near_duplicates(rows, given, config.near_duplicates)
        findings.add(duplicates, given, NEAR_DUPLICATES)
        for kind, count in compared.items():
            findings.counts.setdefault(kind, {})["near_duplicates_compared"] = float(count)
        findings.add(similar_prompts(rows, config.near_duplicates), prompted, SIMILAR_PROMPTS)
    if config.languages:
        strange, findings.languages = languages(rows, filled, config.languages)
        findings.add(strange, filled, LANGUAGE)
    if evaluation:
        contaminated, findings.evaluation = contamination(rows, evaluation, config.near_duplicates)
        findings.add(contaminated, filled, CONTAMINATION)
    return findings


def apply_set_rules(validated: Validated, checked: Mapping[str, Collection[str]], named: Sequence[RowFinding]) -> None:
    """Let the expectations decide about what was found, and move the rows that they refuse to the quarantine.

    Such rows are no bad data: they are ``left_out``, and do not count towards ``max_quarantined``.

    Args:
        checked: By kind, the rules that its rows were checked by.
        named: What they found, with the numbers of raw rows.
    """
    for kind, rules in checked.items():
        frame = validated.frames[kind]
        reasons: dict[str, dict[int, str]] = {rule: {} for rule in rules}
        for finding in named:
            if finding.kind == kind and finding.number is not None:
                reasons[finding.rule].setdefault(finding.number, f"{finding.reason} ({finding.other})")
        for rule, of_rows in reasons.items():
            frame[rule] = found_column(len(frame), of_rows)
        take_set_verdicts(validated, kind, reasons)


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
        numbers = clean.numbers
        ids = validated.frames[kind]["id"] if of_kind else ()
        for finding, severity in of_kind:
            if severity is not None and finding.number is not None:
                number = int(numbers[finding.number])
                origin = clean.origin(number)
                named.append(replace(finding, number=number, id=str(ids[number]), severity=severity, **origin))
    order = list(dict.fromkeys(finding.rule for finding in findings))
    return sorted(named, key=lambda finding: order.index(finding.rule))

"""The rules about whole sets of rows, checked one after another, and the file of what they found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from rlhf_core.data.validation.suites import SET, Suites
from rlhf_core.data.validation.tables import Validated, found_column


@dataclass
class SetFindings:
    """What the rules about the whole set found in the clean rows.

    Attributes:
        breaches: Rows that break a rule which a suite asks for, in the order of rules, kinds and rows.
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

    def add(breaches: Iterable[RowFinding], kinds: Collection[str], *rules: str) -> None:
        named = [(breach, suites.severity(breach.kind, breach.rule)) for breach in breaches]
        known = [replace(breach, severity=severity) for breach, severity in named if severity is not None]
        order = list(dict.fromkeys(breach.rule for breach in known))
        findings.breaches += sorted(known, key=lambda breach: (order.index(breach.rule), filled.index(breach.kind)))
        for kind in kinds:
            findings.checked.setdefault(kind, []).extend(rules)

    leaked, findings.counts = prefix_leakage(rows)
    add(leaked, prompted, PREFIX_RULE, FIRST_TURN_RULE)
    severities = {suites.severity(kind, rule) for kind in filled for rule in (NEAR_DUPLICATES, SIMILAR_PROMPTS)}
    decides = not severities <= {"warn", None}
    if config.near_duplicates.searches(max((clean[kind].num_rows for kind in filled), default=0), decides):
        given = [kind for kind in filled if kind not in derived]
        duplicates, compared = near_duplicates(rows, given, config.near_duplicates)
        add(duplicates, given, NEAR_DUPLICATES)
        for kind, count in compared.items():
            findings.counts.setdefault(kind, {})["near_duplicates_compared"] = float(count)
        add(similar_prompts(rows, config.near_duplicates), prompted, SIMILAR_PROMPTS)
    if config.languages:
        strange, findings.languages = languages(rows, filled, config.languages)
        add(strange, filled, LANGUAGE)
    if evaluation:
        contaminated, findings.evaluation = contamination(rows, evaluation, config.near_duplicates)
        add(contaminated, filled, CONTAMINATION)
    return findings


def apply_set_rules(validated: Validated, findings: SetFindings) -> None:
    """Let the expectations decide about what was found, and move the rows that they refuse to the quarantine.

    Such rows are no bad data: they are ``left_out``, and do not count towards ``max_quarantined``.
    """
    for kind, rules in findings.checked.items():
        frame = validated.frames[kind]
        reasons: dict[str, dict[int, str]] = {rule: {} for rule in rules}
        for found in findings.breaches:
            if found.kind == kind and found.number is not None:
                reasons[found.rule].setdefault(found.number, f"{found.reason} ({found.other})")
        for rule, of_rows in reasons.items():
            frame[rule] = found_column(len(frame), of_rows)
        verdicts = validated.ask(kind, SET)
        validated.take(kind, {rule: v for rule, v in verdicts.items() if rule.name in reasons}, reasons)

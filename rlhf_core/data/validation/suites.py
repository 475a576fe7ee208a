"""Suites of expectations: ``expectations/KIND.json`` and ``KIND.ANYTHING.json``, as Great Expectations writes them.

An expectation gives a rule its name (``meta.rule``) and the reason that the quarantine states (``meta.reason``).
Several may share one. A row that an expectation finds unexpected breaks the rule: ``severity`` is ``critical`` where it
is refused, ``warning`` or ``info`` where it stays and is counted. Limits of ``params.yaml`` are written as
``{"$PARAMETER": "max_turns"}``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.data import NEEDED_FOR_TRAINING, ROW_RULES, SET_RULES, Severity, ValidateConfig
from rlhf_core.config.problems import nearest
from rlhf_core.data.schema import ROW_TYPES
from rlhf_core.data.validation.columns import column_names
from rlhf_core.errors import ConfigError
from rlhf_core.storage.garbage_collection import paused_collector

FOLDER = "expectations"
SOURCE_PASSED = "source_passed"  # of derived rows; no file has it, since nothing else can follow
NOT_DERIVED = "derived only from rows that were refused"
NOT_DUPLICATE = "not_duplicate"
LIMITS = ("max_turns", "max_prompt_chars", "max_reply_chars")
# What own code finds, with the rows that passed all other rules before it.
OF_THE_SET = (NOT_DUPLICATE, SOURCE_PASSED, *SET_RULES)
SEVERITIES: Mapping[str, Severity] = {"critical": "refuse", "warning": "warn", "info": "warn"}


@dataclass(frozen=True, eq=False)
class SuiteRule:
    """An expectation as a rule about rows.

    Attributes:
        name: Of the rule in metrics, and in ``validate.rules``.
        reason: What is wrong with a row that breaks it.
        severity: What becomes of such a row.
        is_fault: Whether it is a bad row: not over a length limit, nor derived from one that failed.
        where: The file and the number of the expectation there, for messages.
        expectation: What Great Expectations runs.
    """

    name: str
    reason: str
    severity: Severity
    is_fault: bool
    where: str
    expectation: Any

    @property
    def of_the_set(self) -> bool:
        """Whether its column is filled by own code, after the rules of single rows."""
        return bool(self.columns) and self.columns <= {*OF_THE_SET}

    @property
    def columns(self) -> set[str]:
        """The columns that it is about; none where it is about the table."""
        return _columns(self.expectation.configuration.kwargs)


@dataclass(frozen=True)
class Suites:
    """The rules of each kind, in the order in which reasons are listed, and the limits that they name."""

    rules: Mapping[str, list[SuiteRule]]
    limits: Mapping[str, int]

    def severity(self, kind: str, rule: str) -> Severity | None:
        """Return what becomes of rows of a kind that break a rule; None where no suite asks for it."""
        return next((r.severity for r in self.rules[kind] if r.name == rule), None)


def read_suites(folder: Path, config: ValidateConfig, derived: Collection[str] = ()) -> Suites:
    """Read all suites of a folder; ``validate.rules`` decides on severities before they do.

    Args:
        derived: Kinds whose rows must come from rows that passed.

    Raises:
        ConfigError: A file cannot be read, or an expectation in it cannot be asked of its kind.
    """
    with paused_collector():
        from great_expectations.expectations.registry import list_registered_expectation_implementations

        from rlhf_core.data.validation.expectations import OWN

    known = [*list_registered_expectation_implementations(), *(own.expectation_type for own in OWN)]
    rules: dict[str, list[SuiteRule]] = {kind: [] for kind in ROW_TYPES}
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.stem.count("."), path.name)):
        kind = path.name.split(".")[0]
        if kind not in ROW_TYPES:
            raise ConfigError(
                f"{path}: there are no rows of kind '{kind}'; {nearest(kind, ROW_TYPES)}: name a suite KIND.json or "
                "KIND.ANYTHING.json"
            )
        rules[kind] += _read_suite(path, kind, config, known)
    for kind, listed in rules.items():
        if kind in derived:
            listed.append(_source_passed())
        _check_needed(folder, kind, listed)
    return Suites(rules, {name: getattr(config, name) for name in LIMITS})


def _read_suite(path: Path, kind: str, config: ValidateConfig, known: Collection[str]) -> Iterator[SuiteRule]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["expectations"]
        if not isinstance(entries, list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        about = f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "no list of them"
        raise ConfigError(
            f"{path} is not a suite of expectations ({about}); write it as JSON with a list 'expectations', or copy "
            "the project's"
        ) from error
    for number, entry in enumerate(entries, 1):
        where = f"{path}, expectation {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ConfigError(f"{where} has no 'type'; give it one, as expect_column_values_to_match_regex")
        rule = _rule(entry, kind, where, config, known)
        if rule is not None:
            yield rule


def _rule(
    entry: Mapping[str, Any], kind: str, where: str, config: ValidateConfig, known: Collection[str]
) -> SuiteRule | None:
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    name, kwargs, meta = entry["type"], dict(entry.get("kwargs") or {}), dict(entry.get("meta") or {})
    if name not in known:
        raise ConfigError(f"{where}: there is no expectation '{name}'; {nearest(name, known)}")
    columns, allowed = _columns(kwargs), [*column_names(kind), *OF_THE_SET]
    lacking = sorted(columns - {*allowed})
    if lacking:
        raise ConfigError(f"{where}: {kind} have no column '{lacking[0]}'; {nearest(lacking[0], allowed)}")
    level = entry.get("severity", "critical")
    if level not in SEVERITIES:
        raise ConfigError(f"{where}: there is no severity '{level}'; choose {', '.join(SEVERITIES)}")
    rule = str(meta.get("rule") or "_".join([name, *sorted(columns)]))
    if rule == "no_secrets" and not config.secrets:
        return None
    reason = str(meta.get("reason") or entry.get("description") or rule.replace("_", " "))
    for limit in LIMITS:
        reason = reason.replace(f"{{{limit}}}", str(getattr(config, limit)))
    severity = config.rules.get(rule, SEVERITIES[level])
    try:
        expectation = ExpectationConfiguration(
            type=name,
            kwargs=kwargs,
            meta=meta | {"where": where},
            description=f"{rule}: {reason} ({_CONSEQUENCE[severity]})",
            severity=FailureSeverity.WARNING if severity == "warn" else FailureSeverity.CRITICAL,
        ).to_domain_obj()
    except Exception as error:  # the library has no common class of errors for wrong arguments
        raise ConfigError(f"{where}: {_first_problem(error)}") from error
    return SuiteRule(rule, reason, severity, bool(meta.get("fault", True)), where, expectation)


_CONSEQUENCE = {
    "refuse": "such rows are refused",
    "warn": "such rows stay and are counted",
    "fail": "a single such row fails the data gate",
}


def _first_problem(error: Exception) -> str:
    """Return what is wrong with the arguments of an expectation, on one line."""
    problems = getattr(error, "errors", None)
    if callable(problems):
        first = problems()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _columns(kwargs: Mapping[str, Any]) -> set[str]:
    named = {str(kwargs[key]) for key in ("column", "column_A", "column_B") if key in kwargs}
    return named | {str(name) for key in ("column_list", "column_set") for name in kwargs.get(key) or ()}


def _source_passed() -> SuiteRule:
    from rlhf_core.data.validation.expectations import ExpectNoFindings

    where = "the rules of derived rows"
    expectation = ExpectNoFindings(
        column=SOURCE_PASSED, description=f"{SOURCE_PASSED}: {NOT_DERIVED}", meta={"where": where}
    )
    return SuiteRule(SOURCE_PASSED, NOT_DERIVED, "refuse", False, where, expectation)


def _check_needed(folder: Path, kind: str, rules: Collection[SuiteRule]) -> None:
    """Refuse suites that let rows through which no stage can train on."""
    of_kind = {"complete"}
    if kind != "pretrain":
        of_kind |= {"prompt_not_empty", "roles"}
    if kind == "preferences":
        of_kind.add("margin_finite")
    for name in (name for name in ROW_RULES if name in NEEDED_FOR_TRAINING & of_kind):
        severities = [rule.severity for rule in rules if rule.name == name]
        if not severities or "warn" in severities:
            what = "must be critical" if severities else "is missing"
            raise ConfigError(
                f"{folder / kind}.json: rule {name} {what}: nothing can be trained on rows that break it; take it over "
                "from the project's suite"
            )

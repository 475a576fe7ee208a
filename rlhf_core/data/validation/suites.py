"""Suites of Great Expectations: read from the files of a data team, checked, and run on tables.

Files are ``expectations/KIND.json`` and ``KIND.ANYTHING.json``, as Great Expectations writes them.
An expectation gives a rule its name (``meta.rule``) and the reason that the quarantine states
(``meta.reason``). Several may share one. A row that an expectation finds unexpected breaks the
rule: ``severity`` is ``critical`` where it is refused, ``warning`` or ``info`` where it stays and
is counted. Where the expectation holds as a whole by ``mostly``, its rows stay and are counted.
Limits of ``params.yaml`` are written as ``{"$PARAMETER": "max_turns"}``. Classes of a team's own
expectations are in Python files beside the suites.

Nothing is sent anywhere: the context is in memory, analytics are off, and the pages of the data
docs load nothing.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rlhf_core.config.data import SET_RULES, Severity, ValidateConfig
from rlhf_core.config.problems import nearest
from rlhf_core.data.schema import CONTENT_FIELDS, ROW_TYPES
from rlhf_core.data.text import excerpt, safe_text
from rlhf_core.errors import ConfigError, first_line
from rlhf_core.storage.garbage_collection import paused_collector

FOLDER = "expectations"
SOURCE_PASSED = "source_passed"  # of derived rows; no file has it, since nothing else can follow
NOT_DERIVED = "derived only from rows that were refused"
NOT_DUPLICATE = "not_duplicate"
LIMITS = ("max_turns", "max_prompt_chars", "max_reply_chars")
SEVERITIES: Mapping[str, Severity] = {"critical": "refuse", "warning": "warn", "info": "warn"}


LABELS = ("category", "source", "group")
CONTRADICTED_BY = "contradicted_by"
# An array of ordinary strings can hold only 2 GiB, which the texts of a column may exceed.
TEXT = pa.large_string()
PROMPT_COLUMNS = {
    "prompt": TEXT,
    "roles": TEXT,
    "turns": pa.int64(),
    "prompt_chars": pa.int64(),
    "blank_turns": pa.int64(),
    "last_turn": TEXT,
}


def column_schema(kind: str) -> pa.Schema:
    """Return the columns of a kind that are taken from its rows.

    ``prompt`` is the dialogue as text and ``roles`` who speaks, ``system user assistant user``;
    ``blank_turns`` counts turns of the user or the assistant without visible text, and a prompt
    without turns as one.
    """
    prompt = PROMPT_COLUMNS if kind != "pretrain" else {}
    margin = {}
    if kind == "preferences":
        margin = {"margin": pa.float64()}
    texts = dict.fromkeys(CONTENT_FIELDS[kind], TEXT)
    return pa.schema({"id": TEXT, **prompt, **texts, **margin, **dict.fromkeys(LABELS, TEXT)})


def column_names(kind: str) -> list[str]:
    """Return the columns that an expectation may name, without those of rules about the set."""
    names = list(column_schema(kind).names)
    if kind == "preferences":
        names.append(CONTRADICTED_BY)
    return names


@dataclass(frozen=True, eq=False)
class SuiteRule:
    """An expectation as a rule about rows.

    Attributes:
        name: Of the rule in metrics, and in ``validate.rules``.
        reason: What is wrong with a row that breaks it.
        is_fault: Whether it is a bad row: not over a length limit, nor derived from one that
            failed.
        where: The file and the number of the expectation there, for messages.
        columns: What it is about; none where it is about the table.
    """

    name: str
    reason: str
    severity: Severity
    is_fault: bool
    where: str
    columns: Collection[str]
    expectation: Any


@dataclass(frozen=True)
class Suites:
    """The rules of each kind, in the order of reasons, and the limits that they name."""

    rules: Mapping[str, list[SuiteRule]]
    limits: Mapping[str, int]

    def severity(self, kind: str, rule: str) -> Severity | None:
        """Return what becomes of rows that break a rule; None where no suite asks for it."""
        for asked in self.rules[kind]:
            if asked.name == rule:
                return asked.severity
        return None


def read_suites(folder: Path, config: ValidateConfig, derived: Collection[str] = ()) -> Suites:
    """Read all suites of a folder; ``validate.rules`` decides on severities before they do.

    Args:
        derived: Kinds whose rows must come from rows that passed.

    Raises:
        ConfigError: A file cannot be read, or an expectation in it cannot be asked of its kind.
    """
    with paused_collector():
        from great_expectations.expectations.registry import (
            list_registered_expectation_implementations,
        )

        from rlhf_core.data.validation.expectations import OWN, ExpectNoFindings

    _load_classes(folder)
    known = [*list_registered_expectation_implementations(), *(own.expectation_type for own in OWN)]
    rules: dict[str, list[SuiteRule]] = {kind: [] for kind in ROW_TYPES}
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.stem.count("."), path.name)):
        kind = path.name.split(".")[0]
        if kind not in ROW_TYPES:
            raise ConfigError(
                f"{path}: there are no rows of kind '{kind}'; {nearest(kind, ROW_TYPES)}: name a suite KIND.json or "
                "KIND.ANYTHING.json"
            )
        for where, entry in _entries(path):
            rule = _rule(entry, kind, where, config, known)
            if rule.name != "no_secrets" or config.secrets:
                rules[kind].append(rule)
    for kind in derived:
        where = "the rules of derived rows"
        expectation = ExpectNoFindings(
            column=SOURCE_PASSED,
            description=f"{SOURCE_PASSED}: {NOT_DERIVED}",
            meta={"where": where},
        )
        rule = SuiteRule(
            SOURCE_PASSED, NOT_DERIVED, "refuse", False, where, {SOURCE_PASSED}, expectation
        )
        rules[kind].append(rule)
    for kind, listed in rules.items():
        _require_needed(folder / f"{kind}.json", kind, listed)
    return Suites(rules, {name: getattr(config, name) for name in LIMITS})


class _WithoutBytecode(SourceFileLoader):
    """Loads a Python file and leaves nothing beside it."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Keep no bytecode."""


def _load_classes(folder: Path) -> None:
    """Run the Python files of a folder, by which the library knows their expectations.

    No bytecode is left beside them: the folder is an input of the stage.

    Raises:
        ConfigError: A file cannot be read or raises.
    """
    # It warns of a class that is read again.
    logging.getLogger("great_expectations").setLevel(logging.ERROR)
    for path in sorted(folder.glob("*.py")):
        loader = _WithoutBytecode(f"{FOLDER}_{path.stem}", str(path))
        module = ModuleType(loader.name)
        sys.modules[module.__name__] = module  # where annotations of a class are looked up
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{path}: its expectations cannot be loaded ({problem})") from error


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the expectations of a file, each with what names it in messages."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["expectations"]
        if not isinstance(entries, list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        about = "no list of them"
        if isinstance(error, json.JSONDecodeError):
            about = f"{error.msg}, line {error.lineno}"
        raise ConfigError(
            f"{path} is not a suite of expectations ({about}); write it as JSON with a list 'expectations', or copy "
            "the project's"
        ) from error
    for number, entry in enumerate(entries, 1):
        where = f"{path}, expectation {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ConfigError(
                f"{where} has no 'type'; give it one, as expect_column_values_to_match_regex"
            )
        yield where, entry


def _rule(
    entry: Mapping[str, Any], kind: str, where: str, config: ValidateConfig, known: Collection[str]
) -> SuiteRule:
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    name = entry["type"]
    kwargs = dict(entry.get("kwargs") or {})
    meta = dict(entry.get("meta") or {})
    if name not in known:
        raise ConfigError(f"{where}: there is no expectation '{name}'; {nearest(name, known)}")
    columns = {str(kwargs[key]) for key in ("column", "column_A", "column_B") if key in kwargs}
    for key in ("column_list", "column_set"):
        columns.update(map(str, kwargs.get(key) or ()))
    allowed = [*column_names(kind), NOT_DUPLICATE, SOURCE_PASSED, *SET_RULES]
    lacking = sorted(columns - {*allowed})
    if lacking:
        raise ConfigError(
            f"{where}: {kind} have no column '{lacking[0]}'; {nearest(lacking[0], allowed)}"
        )
    level = entry.get("severity", "critical")
    if level not in SEVERITIES:
        raise ConfigError(
            f"{where}: there is no severity '{level}'; choose {', '.join(SEVERITIES)}"
        )
    rule = str(meta.get("rule") or "_".join([name, *sorted(columns)]))
    reason = str(meta.get("reason") or entry.get("description") or rule.replace("_", " "))
    for limit in LIMITS:
        reason = reason.replace(f"{{{limit}}}", str(getattr(config, limit)))
    severity = config.rules.get(rule, SEVERITIES[level])
    of_library = FailureSeverity.WARNING if severity == "warn" else FailureSeverity.CRITICAL
    try:
        expectation = ExpectationConfiguration(
            type=name,
            kwargs=kwargs,
            meta=meta | {"where": where},
            description=f"{rule}: {reason} ({_consequence(severity, kwargs.get('mostly', 1))})",
            severity=of_library,
        ).to_domain_obj()
    except Exception as error:  # the library has no common class of errors for wrong arguments
        problem = first_line(error)
        if callable(problems := getattr(error, "errors", None)):  # pydantic's
            problem = f"{'.'.join(map(str, problems()[0]['loc']))}: {problems()[0]['msg']}"
        raise ConfigError(f"{where}: {problem}") from error
    return SuiteRule(
        rule, reason, severity, bool(meta.get("fault", True)), where, columns, expectation
    )


def _consequence(severity: str, mostly: float) -> str:
    """What becomes of rows that break a rule, which holds where a share of ``mostly`` meets it."""
    stays = "such rows stay and are counted"
    if severity == "warn":
        return stays
    if mostly == 1:
        refuses = severity == "refuse"
        return "such rows are refused" if refuses else "a single such row fails the data gate"
    end = "they are refused" if severity == "refuse" else "the data gate fails"
    return f"{stays}; where fewer than {mostly} of all meet it, {end}"


def _require_needed(path: Path, kind: str, rules: Collection[SuiteRule]) -> None:
    """Refuse suites that let rows through which no stage can train on."""
    needed = ["complete"]
    if kind != "pretrain":
        needed += ["prompt_not_empty", "roles"]
    if kind == "preferences":
        needed.append("margin_finite")
    for name in needed:
        severities = [rule.severity for rule in rules if rule.name == name]
        if not severities or "warn" in severities:
            what = "must be critical" if severities else "is missing"
            raise ConfigError(
                f"{path}: rule {name} {what}: nothing can be trained on rows that break it; take it over from the "
                "project's suite"
            )


SITE = "data_docs"
SHOWN_ROWS = 20
# Pages of the data docs: what is asked of rows by themselves, then which are copies or derived,
# then of the set.
ROWS = "rows"
COPIES = "copies"
SET = "set"
PAGES = {ROWS: "each row by itself", COPIES: "copies and derived rows", SET: "the whole set"}
RESULT_FORMAT = {
    "result_format": "COMPLETE",
    "partial_unexpected_count": SHOWN_ROWS,
    "return_unexpected_index_query": False,
}
# What the library's pages load, also in their own style, what of them works with that alone, and
# its invitation to a newsletter.
_LOADED = re.compile(
    r"<footer>.*?</footer>|<link\b[^>]*>|<style>.*?</style>|<script\b.*?</script>|<img\b[^>]*>"
    r"|<div class=\"card mb-3\">\s*<div class=\"card-header p-2\">\s*<strong>Actions</strong>"
    r".*?</div>\s*</div>\s*</div>",
    re.DOTALL,
)
_BODY = re.compile(r"<body[^<>]*>")
_INDEX = """<!DOCTYPE html>
<html>
<head><title>Data Docs</title><meta charset="UTF-8"></head>
<body>
<table>
<tr><th>kind</th><th>what is checked</th><th>result</th><th>suite</th></tr>
{rows}
</table>
</body>
</html>
"""
STYLE = Path(__file__).with_name("data_docs.css")


@dataclass(frozen=True)
class RuleVerdict:
    """What an expectation says.

    Attributes:
        passed: Whether it holds as a whole; with ``mostly`` it may although some rows are
            unexpected, which stay then.
        rows: The numbers of the unexpected rows; None for an expectation of the whole table.
    """

    passed: bool
    rows: npt.NDArray[np.int64] | None


Verdicts = dict[SuiteRule, RuleVerdict]


class Checkpoints:
    """The checkpoints of all kinds in one context."""

    def __init__(self, suites: Suites) -> None:
        os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the library is imported
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        with paused_collector():
            import great_expectations as gx
        from great_expectations.data_context.types.base import ProgressBarsConfig

        self.suites = suites
        self._gx = gx
        self._asked: set[SuiteRule] = set()
        self._results: list[tuple[str, Any, Any]] = []
        self._context = gx.get_context(mode="ephemeral")
        self._context.variables.progress_bars = ProgressBarsConfig(globally=False)
        raw = self._context.data_sources.add_pandas("raw")
        self._batches = {
            kind: raw.add_dataframe_asset(kind).add_batch_definition_whole_dataframe("all rows")
            for kind, rules in suites.rules.items()
            if rules
        }

    def run(
        self, kind: str, frame: pd.DataFrame, page: str, where: Callable[[int], str]
    ) -> Verdicts:
        """Check the rows of a kind by those of its rules whose columns are there now, each once.

        Args:
            page: ``ROWS``, ``COPIES`` or ``SET``: the page of the data docs that shows it.
            where: What names a row, by its number.

        Raises:
            ConfigError: An expectation could not be evaluated.
        """
        rules = []
        for rule in self.suites.rules[kind]:
            if rule not in self._asked and {*rule.columns} <= {*frame.columns}:
                rules.append(rule)
        if not rules:
            return {}
        self._asked.update(rules)
        from great_expectations.core.run_identifier import RunIdentifier

        gx = self._gx
        context = self._context
        name = kind if page == ROWS else f"{kind}_{page}"
        expectations = [
            rule.expectation.copy(deep=True) for rule in rules
        ]  # one belongs to one suite alone
        suite = context.suites.add(gx.ExpectationSuite(name, expectations=expectations))
        definition = context.validation_definitions.add(
            gx.ValidationDefinition(name=name, data=self._batches[kind], suite=suite)
        )
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=name, validation_definitions=[definition], result_format=RESULT_FORMAT
            )
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = checkpoint.run(
                batch_parameters={"dataframe": frame},
                expectation_parameters=dict(self.suites.limits),
                run_id=RunIdentifier(run_name=page),  # a folder of the data docs
            )
        key: Any
        result: Any
        ((key, result),) = run.run_results.items()
        self._results.append((kind, key, result))
        outcomes = {outcome.expectation_config.meta["where"]: outcome for outcome in result.results}
        verdicts: Verdicts = {}
        for rule in rules:
            outcome = outcomes[rule.where]
            info = outcome.exception_info or {}
            for one in [info] if "raised_exception" in info else info.values():
                if one.get("raised_exception"):  # what was not asked is no verdict
                    problem = excerpt(str(one.get("exception_message")))
                    raise ConfigError(f"{rule.where} could not be evaluated: {problem}")
            rows = None
            if outcome.result:
                rows = outcome.result.get("unexpected_index_list")
            if rows is not None:
                rows = np.array(rows, np.int64)
            verdicts[rule] = RuleVerdict(bool(outcome.success), rows)
            _show(outcome, rule, kind, frame, where)
        return verdicts

    def write_docs(self, docs: Path, failed: Collection[str]) -> None:
        """Write the data docs to a folder, with the verdict of the data gate.

        Args:
            failed: The metrics of the gate's conditions that failed, ``KIND.METRIC``.
        """
        for kind, key, result in self._results:
            result.success = not any(metric.partition(".")[0] == kind for metric in failed)
            result.meta["batch_spec"] = {"data_asset_name": kind}
            self._context.validation_results_store.set(key, result)
        for name in list(self._context.variables.data_docs_sites or {}):
            self._context.delete_data_docs_site(name)
        store = {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(docs.absolute()),
        }
        index = {"class_name": "DefaultSiteIndexBuilder"}
        site: Any = {
            "class_name": "SiteBuilder",
            "site_index_builder": index,
            "store_backend": store,
            "show_how_to_buttons": False,
        }
        self._context.add_data_docs_site(site_name=SITE, site_config=site)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._context.build_data_docs(site_names=[SITE])
        verdict = (
            f"The data gate failed: {', '.join(sorted(failed))}"
            if failed
            else "The data passed its gate"
        )
        shutil.rmtree(docs / "static", ignore_errors=True)  # what the library's own pages load
        # The library's index is empty without scripts from elsewhere.
        (docs / "index.html").write_text(self._index(docs), encoding="utf-8")
        for page in docs.rglob("*.html"):
            page.write_text(
                offline_page(page.read_text(encoding="utf-8"), verdict), encoding="utf-8"
            )

    def _index(self, docs: Path) -> str:
        """Return the first page of the data docs: a row for each result, with links to its pages."""
        rows = []
        for kind, key, result in self._results:
            suite = key.expectation_suite_identifier.name
            (page,) = docs.glob(f"validations/{suite}/*/*/*.html")
            held = sum(bool(outcome.success) for outcome in result.results)
            rows.append(
                f"<tr><td>{kind}</td><td>{PAGES[key.run_id.run_name]}</td>"
                f'<td><a href="{page.relative_to(docs)}">{held} of {len(result.results)} expectations hold</a></td>'
                f'<td><a href="expectations/{suite}.html">what is expected</a></td></tr>'
            )
        return _INDEX.format(rows="\n".join(rows))


def offline_page(page: str, verdict: str) -> str:
    """Return a page of the data docs that loads nothing, below the data gate's verdict."""
    style = STYLE.read_text(encoding="utf-8")
    page = _LOADED.sub("", page).replace("</head>", f"<style>{style}</style></head>", 1)
    banner = f'<p class="verdict">{html.escape(safe_text(verdict))}</p>'
    return _BODY.sub(lambda body: body[0] + banner, page, count=1)


def _show(
    outcome: Any, rule: SuiteRule, kind: str, frame: pd.DataFrame, where: Callable[[int], str]
) -> None:
    """Leave in an outcome what the data docs show: the first rows that break the rule."""
    result = outcome.result
    rows = result.get("unexpected_index_list")
    for name in ("unexpected_list", "unexpected_index_list", "partial_unexpected_index_list"):
        result.pop(name, None)
    if rows is None:
        observed = result.get("observed_value")
        if isinstance(observed, str | list):
            shown = safe_text(excerpt(str(observed)))
            result["observed_value"] = html.escape(shown)
        return
    # The library puts values into its pages as they are.
    quoted = []
    for row in rows[:SHOWN_ROWS]:
        quoted.append(html.escape(f"{safe_text(where(row))}: {_text(rule, kind, frame, row)}"))
    result |= {
        "partial_unexpected_list": quoted,
        "partial_unexpected_counts": [{"value": s, "count": 1} for s in quoted],
    }


def _text(rule: SuiteRule, kind: str, frame: pd.DataFrame, row: int) -> str:
    """Return a row's values in the columns of a rule; with a number also the text it measures."""
    columns = [name for name in frame.columns if name in rule.columns]
    shown = []
    for name in columns:
        value: Any = frame[name].iat[row]
        text = "(null)" if pd.isna(value) else excerpt(str(value))
        shown.append(text)
    text = " | ".join(shown)
    if "prompt" in frame and not {*columns} & {*CONTENT_FIELDS[kind], "last_turn"}:
        text += f" ({excerpt(str(frame['prompt'].iat[row]))})"
    return safe_text(text)

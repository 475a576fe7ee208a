"""Run suites with Great Expectations: which rows break which rules, and the data docs that show it.

Nothing is sent anywhere: the context is in memory, analytics are off, and the pages of the data docs load nothing.
"""

from __future__ import annotations

import html
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rlhf_core.data.text.safe_text import excerpt, safe_text
from rlhf_core.data.validation.columns import REPLIES
from rlhf_core.data.validation.suites import NOT_DUPLICATE, SOURCE_PASSED, SuiteRule, Suites
from rlhf_core.errors import ConfigError
from rlhf_core.storage.garbage_collection import paused_collector

SITE = "data_docs"
SHOWN_ROWS = 20
# What is asked of rows by themselves, then of those that are copies of others or derived from them, then of the set.
ROWS, COPIES, SET = "rows", "copies", "set"
RESULT_FORMAT = {
    "result_format": "COMPLETE",
    "partial_unexpected_count": SHOWN_ROWS,
    "return_unexpected_index_query": False,
}
# What the library's pages load from elsewhere, and what of them works with that alone.
_LOADED = re.compile(
    r"<link\b[^>]*\bhref=[\"']https?:[^>]*>|<script\b.*?</script>|<img\b[^>]*>"
    r"|<div class=\"card mb-3\">\s*<div class=\"card-header p-2\">\s*<strong>Actions</strong>"
    r".*?</div>\s*</div>\s*</div>",
    re.DOTALL,
)
_BODY = re.compile(r"<body[^>]*>")
STYLE = Path(__file__).with_name("data_docs.css")


@dataclass(frozen=True)
class RuleVerdict:
    """What an expectation says.

    Attributes:
        passed: Whether it holds as a whole; with ``mostly`` it may although some rows are unexpected.
        rows: The numbers of the rows that break it, none where it holds; None for an expectation of the whole table.
    """

    passed: bool
    rows: npt.NDArray[np.int64] | None


Verdicts = dict[SuiteRule, RuleVerdict]


class Checkpoints:
    """The checkpoints of all kinds in one context: the rules of single rows first, then those of the whole set."""

    def __init__(self, suites: Suites) -> None:
        os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the library is imported
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        with paused_collector():
            import great_expectations as gx
        from great_expectations.data_context.types.base import ProgressBarsConfig

        self.suites, self._gx = suites, gx
        self._results: list[tuple[str, Any, Any]] = []
        self._context = gx.get_context(mode="ephemeral")
        self._context.variables.progress_bars = ProgressBarsConfig(globally=False)

    def run(self, kind: str, frame: pd.DataFrame, part: str, where: Callable[[int], str]) -> Verdicts:
        """Ask the rules of a kind of its rows, those whose columns are there.

        Args:
            part: ``ROWS`` for the rules of single rows, ``COPIES`` for those that tell which rows repeat others,
                ``SET`` for all that need more than a row, which are shown together.
            where: What names a row, by its number.

        Raises:
            ConfigError: An expectation could not be evaluated.
        """
        rules = [r for r in self.suites.rules[kind] if _asked(r, part) and r.columns <= {*frame.columns}]
        if not rules:
            return {}
        result = self._validated(kind, part, frame, rules)
        outcomes = {outcome.expectation_config.meta["where"]: outcome for outcome in result.results}
        verdicts: Verdicts = {}
        for rule in rules:
            outcome = outcomes[rule.where]
            _check_evaluated(rule, outcome)
            rows = outcome.result.get("unexpected_index_list") if outcome.result else None
            if rows is not None:
                rows = np.array([] if outcome.success else rows, np.int64)
            verdicts[rule] = RuleVerdict(bool(outcome.success), rows)
            _show(outcome, rule, kind, frame, where)
        return verdicts

    def _validated(self, kind: str, part: str, frame: pd.DataFrame, rules: Sequence[SuiteRule]) -> Any:
        gx, context, name = self._gx, self._context, kind if part == ROWS else f"{kind}_{part}"
        asset = context.data_sources.add_or_update_pandas(f"raw_{name}").add_dataframe_asset(kind)
        expectations = [rule.expectation.copy(deep=True) for rule in rules]  # one belongs to one suite alone
        suite = context.suites.add(gx.ExpectationSuite(name, expectations=expectations))
        definition = context.validation_definitions.add(
            gx.ValidationDefinition(name=name, data=asset.add_batch_definition_whole_dataframe("all rows"), suite=suite)
        )
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(name=name, validation_definitions=[definition], result_format=RESULT_FORMAT)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = checkpoint.run(batch_parameters={"dataframe": frame}, expectation_parameters=dict(self.suites.limits))
        ((key, result),) = run.run_results.items()
        if part == COPIES:  # which are asked again with the rest of the set
            context.validation_results_store.remove_key(key)
            context.suites.delete(name)
        else:
            self._results.append((kind, key, result))
        return result

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
        store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())}
        index = {"class_name": "DefaultSiteIndexBuilder"}
        site: Any = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
        self._context.add_data_docs_site(site_name=SITE, site_config=site)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._context.build_data_docs(site_names=[SITE])
        verdict = f"The data gate failed: {', '.join(sorted(failed))}" if failed else "The data passed its gate"
        for page in docs.rglob("*.html"):
            page.write_text(offline_page(page.read_text(encoding="utf-8"), verdict), encoding="utf-8")


def offline_page(page: str, verdict: str) -> str:
    """Return a page of the data docs that loads nothing, with the verdict of the data gate above it."""
    style = STYLE.read_text(encoding="utf-8")
    page = _LOADED.sub("", page).replace("</head>", f"<style>{style}</style></head>", 1)
    banner = f'<p class="verdict">{html.escape(safe_text(verdict))}</p>'
    return _BODY.sub(lambda body: body[0] + banner, page, count=1)


def _asked(rule: SuiteRule, part: str) -> bool:
    if part == COPIES:
        return bool(rule.columns) and rule.columns <= {NOT_DUPLICATE, SOURCE_PASSED}
    return rule.of_the_set == (part == SET)


def _check_evaluated(rule: SuiteRule, outcome: Any) -> None:
    """Refuse an expectation that raised: what was not asked is no verdict."""
    info = outcome.exception_info or {}
    raised = [info] if "raised_exception" in info else list(info.values())
    messages = [str(one.get("exception_message")) for one in raised if one.get("raised_exception")]
    if messages:
        raise ConfigError(f"{rule.where} could not be evaluated: {excerpt(messages[0])}")


def _show(outcome: Any, rule: SuiteRule, kind: str, frame: pd.DataFrame, where: Callable[[int], str]) -> None:
    """Leave in an outcome what the data docs show: the first rows that break the rule, with their text."""
    result = outcome.result
    rows = result.get("unexpected_index_list")
    for name in ("unexpected_list", "unexpected_index_list", "partial_unexpected_index_list"):
        result.pop(name, None)
    if rows is None:
        observed = result.get("observed_value")
        if isinstance(observed, str | list):
            result["observed_value"] = html.escape(safe_text(excerpt(str(observed))))
        return
    # The library puts values into its pages as they are.
    shown = [html.escape(f"{safe_text(where(row))}: {_text(rule, kind, frame, row)}") for row in rows[:SHOWN_ROWS]]
    result |= {"partial_unexpected_list": shown, "partial_unexpected_counts": [{"value": s, "count": 1} for s in shown]}


def _text(rule: SuiteRule, kind: str, frame: pd.DataFrame, row: int) -> str:
    """Return what a row has in the columns of a rule; beside a number also the text that it was taken of."""
    columns = [name for name in frame.columns if name in rule.columns]
    values: list[Any] = [frame[name].iat[row] for name in columns]
    text = " | ".join("(null)" if pd.isna(value) else str(value) for value in values)
    if "prompt" in frame and not any(name in (*REPLIES[kind], "prompt", "last_turn") for name in columns):
        text += f" ({frame['prompt'].iat[row]})"
    return safe_text(excerpt(text))

"""Run Great Expectations: a suite per kind over its check columns, the rows that fail, and the data docs."""

from __future__ import annotations

import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_core.data.validation.checks import RowCheck
from rlhf_core.errors import DataError
from rlhf_core.storage.garbage_collection import paused_collector

SITE = "data_docs"


def run_suites(
    frames: Mapping[str, pd.DataFrame], checks: Mapping[str, Sequence[RowCheck]], docs: Path
) -> dict[str, dict[int, list[str]]]:
    """Validate every frame by its checks and write the data docs to ``docs``.

    Nothing is sent anywhere: the context is ephemeral and analytics are off.

    Returns:
        By kind, the positions (``row_id``) of rows that fail with the columns of the checks that they fail.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read when the library is imported
    logging.getLogger("great_expectations").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with paused_collector():
            import great_expectations as gx

        context = _context(gx, docs)
        failures = {kind: _run_kind(gx, context, kind, frames[kind], checks[kind]) for kind in frames}
        # Once for all kinds: the action of a checkpoint would render the index again after each kind.
        context.build_data_docs(site_names=[SITE])
    return failures


def _context(gx: Any, docs: Path) -> Any:
    """Return a context in memory without progress bars, whose only site is ``docs``."""
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    for name in list(context.variables.data_docs_sites or {}):
        context.delete_data_docs_site(name)
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())}
    index = {"class_name": "DefaultSiteIndexBuilder"}
    site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
    context.add_data_docs_site(site_name=SITE, site_config=site)
    return context


def _run_kind(
    gx: Any, context: Any, kind: str, frame: pd.DataFrame, checks: Sequence[RowCheck]
) -> dict[int, list[str]]:
    asset = context.data_sources.add_or_update_pandas(f"raw_{kind}").add_dataframe_asset(kind)
    suite = gx.ExpectationSuite(kind, expectations=[_expectation(check) for check in checks])
    definition = gx.ValidationDefinition(
        name=kind, data=asset.add_batch_definition_whole_dataframe("all_rows"), suite=context.suites.add(suite)
    )
    validation = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": frame},
        result_format={
            "result_format": "COMPLETE",
            "unexpected_index_column_names": ["row_id"],
            "return_unexpected_index_query": False,
        },
    )
    return _failed_rows(kind, validation.results)


def _expectation(check: RowCheck) -> Any:
    """Return the expectation that a flag is 1 or a number within its bounds."""
    import great_expectations.expectations as gxe

    severity = "warning" if check.severity == "warn" else "critical"
    fields: dict[str, Any] = {
        "column": check.column,
        "description": f"Not allowed: {check.reason}",
        "severity": severity,
    }
    if check.is_flag:
        return gxe.ExpectColumnValuesToBeInSet(value_set=[1], **fields)
    return gxe.ExpectColumnValuesToBeBetween(min_value=check.low, max_value=check.high, **fields)


def _failed_rows(kind: str, results: Sequence[Any]) -> dict[int, list[str]]:
    failed: defaultdict[int, list[str]] = defaultdict(list)
    for result in results:
        column = result.expectation_config.kwargs["column"]
        exception = result.exception_info or {}
        if exception.get("raised_exception") or "unexpected_index_list" not in result.result:
            raise DataError(
                f"the check {column} of {kind} could not be run: {exception.get('exception_message', exception)}"
            )
        for entry in result.result["unexpected_index_list"] or []:
            failed[int(entry["row_id"])].append(column)
    return dict(failed)

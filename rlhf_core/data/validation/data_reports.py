"""The door of data reports: what packages write about the data that stage validate has checked.

A data report is an entry point of ``rlhf.data_reports``: a function like :class:`DataReport`. The
data card is one; it comes with the extras.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.config.data import ValidateConfig
from rlhf_core.data.dataset import KindStatistics
from rlhf_core.data.row_counts import FINDINGS_SCHEMA, findings_table
from rlhf_core.data.schema import write_table
from rlhf_core.data.statistics import TokenCounts
from rlhf_core.data.validation.set_rules import SetFindings
from rlhf_core.data.validation.tables import Validated
from rlhf_core.errors import first_line
from rlhf_core.plugins import DATA_REPORTS, known_plugins, load_plugin
from rlhf_core.storage.files import atomic_dir

logger = logging.getLogger(__name__)

FINDINGS_FILE = "findings.parquet"


@dataclass(frozen=True)
class CheckedData:
    """What stage validate knows of the data when it has checked them.

    Attributes:
        manifest: ``manifest.json`` of the raw data.
        validated: The result of validation.
        set_findings: What was found in whole sets of rows.
        metrics: The content of ``metrics/data.json``.
        statistics: Those of the clean rows by kind.
        failed: The metrics of the data gate's conditions that failed.
        tokens: Counts of tokens by kind; None without a tokenizer.
    """

    manifest: Mapping[str, Any]
    validated: Validated
    set_findings: SetFindings
    metrics: Mapping[str, Any]
    statistics: Mapping[str, KindStatistics]
    failed: Sequence[str]
    tokens: Mapping[str, TokenCounts] | None = None


class DataReport(Protocol):
    """Writes files into ``folder``, which is ``data/card`` of the workspace."""

    def __call__(self, folder: Path, data: CheckedData, config: ValidateConfig) -> None: ...


def write_reports(folder: Path, data: CheckedData, config: ValidateConfig) -> None:
    """Write ``findings.parquet`` and what each data report has to say into ``folder``.

    The rows are the same without a report, so one that is missing or fails costs a warning.
    """
    findings = [*data.set_findings.breaches]
    for counted in (data.tokens or {}).values():
        findings += counted.unwritable
    with atomic_dir(folder) as target:
        write_table(target / FINDINGS_FILE, findings_table(findings, FINDINGS_SCHEMA))
        for name in known_plugins(DATA_REPORTS):
            try:
                load_plugin(DATA_REPORTS, name)(target, data, config)
            except (Exception, SystemExit) as error:  # whatever the code of others raises
                logger.warning("the data report %s is left out: %s", name, first_line(error))

"""What metrics.yaml, of which docs/metrics.md is made, explains of the metrics in a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.evaluation.report.metrics import glossary, metrics_of


def documented(file: str | None = None) -> set[str]:
    """The metrics that are explained of ``file``, such as ``history/ppo.jsonl``; None for those of
    all files.
    """
    sections = [
        section
        for section in glossary()["sections"]
        if file is None or file in section.get("files", ())
    ]
    return {name for section in sections for metric in metrics_of(section) for name in metric.names}


def undocumented(file: str, rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Fields of these rows of ``file`` that are not explained. NAME stands for a name of the user's
    own.
    """
    known = re.compile("|".join(name.replace("NAME", r"\w+") for name in documented(file)))
    return {name for row in rows for name in row if not known.fullmatch(name)}

"""Probes of reward model, referee and judge as one table.

Report, model card and ``rlhf gate reward --explain`` show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.gates import ABSENT, PROBES, WORLD_PROBES
from rlhf_core.evaluation.figures import format_interval, format_number
from rlhf_core.evaluation.report.metrics import labelled

# By the name of their metrics.
PROBED_MODELS = {"reward": "reward model", "referee": "referee", "judge": "judge"}
CAPTION = "How often a held-out reply scores above a copy of it that is worse for one known reason (95 % interval)"


@dataclass(frozen=True)
class ProbeTable:
    """Texts of a table, and what it has no row for.

    Attributes:
        header: The kind of copy, a column for each model that was probed, and the number of pairs.
        rows: Rates with their intervals.
        notes: For each kind that the data cannot show, why.
    """

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def probe_table(metrics: Mapping[str, Mapping[str, Any]]) -> ProbeTable | None:
    """Return the table of the probed models; None where no model was probed.

    Args:
        metrics: Those of ``reward``, ``referee`` and ``judge``, by these names.
    """
    probed: dict[str, Mapping[str, Any]] = {}
    for name in PROBED_MODELS:
        if probes := metrics.get(name, {}).get("probes"):
            probed[name] = probes
    if not probed:
        return None
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for kind in (*PROBES, *WORLD_PROBES):
        label = labelled()[f"probes.{kind}"].label
        cells: list[str] = []
        counts: set[int] = set()
        reasons: dict[str, None] = {}
        for probes in probed.values():
            cells.append(_cell(probes, kind))
            if kind in probes:
                counts.add(round(probes[f"{kind}_pairs"]))
            if reason := probes.get(ABSENT, {}).get(kind):
                reasons[f"{label}: {reason}"] = None
        if counts:
            rows.append((label, *cells, " or ".join(map(str, sorted(counts)))))
        notes += reasons
    models = (PROBED_MODELS[name] for name in probed)
    return ProbeTable(("the copy", *models, "pairs"), rows, notes)


def _cell(probes: Mapping[str, Any], kind: str) -> str:
    if kind not in probes:
        return ""
    ends = format_interval(probes[f"{kind}_low95"], probes[f"{kind}_high95"])
    return f"{format_number(probes[kind], 2)} ({ends})"

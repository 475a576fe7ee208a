"""Probes of reward model, referee and judge as one table: for report, model card and
``rlhf gate reward --explain``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.gates import ABSENT, PROBES, WORLD_PROBES
from rlhf_core.evaluation.report.metrics import labelled

PROBED_MODELS = {
    "reward": "reward model",
    "referee": "referee",
    "judge": "judge",
}  # by the name of their metrics
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
    """Return the table of the metrics by name (``reward``, ``referee``, ``judge``); None where no
    model was probed.
    """
    probed = {
        name: metrics[name]["probes"]
        for name in PROBED_MODELS
        if metrics.get(name, {}).get("probes")
    }
    if not probed:
        return None
    rows, notes = [], []
    for kind in (*PROBES, *WORLD_PROBES):
        label = labelled()[f"probes.{kind}"].label
        counts = {f"{probes[f'{kind}_pairs']:.0f}" for probes in probed.values() if kind in probes}
        if counts:
            cells = (_cell(probes, kind) for probes in probed.values())
            rows.append((label, *cells, " or ".join(sorted(counts, key=int))))
        reasons = (probes.get(ABSENT, {}).get(kind) for probes in probed.values())
        notes += [f"{label}: {reason}" for reason in dict.fromkeys(filter(None, reasons))]
    models = (PROBED_MODELS[name] for name in probed)
    return ProbeTable(("the copy", *models, "pairs"), rows, notes)


def _cell(probes: Mapping[str, Any], kind: str) -> str:
    if kind not in probes:
        return ""
    return f"{probes[kind]:.2f} ({probes[f'{kind}_low95']:.2f} to {probes[f'{kind}_high95']:.2f})"

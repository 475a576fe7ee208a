"""Everything that is written at the end of an ablation, from its runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlhf_core.config.ablation.ablation import Ablation
from rlhf_core.evaluation.ablation.figures import draw
from rlhf_core.evaluation.ablation.intervals import Table
from rlhf_core.evaluation.ablation.page import insert, write_page
from rlhf_core.evaluation.ablation.results import Run, read_results, write_csv
from rlhf_core.evaluation.ablation.verdicts import Verdict, judge
from rlhf_core.files import atomic_write_json, atomic_write_text

FIGURES = "figures"
DOCS_FIGURES = Path("images") / "ablation"


def summarise(
    ablation: Ablation, runs: Iterable[Run], folder: Path, docs: Path | None = None
) -> dict[str, list[Verdict]]:
    """Write ``results.csv``, ``verdicts.json``, ``table.md`` and ``figures/`` into ``folder``.

    With ``docs`` the same text goes between the markers of that page, and the figures beside it under
    ``images/ablation``. Returns the verdicts by figure.
    """
    results = read_results(runs)
    table = Table(results)
    verdicts = {figure.name: [judge(claim, table) for claim in figure.claims] for figure in ablation.figures}
    drawn = {figure.name for figure in ablation.figures if draw(_picture(folder, figure.name), figure, results)}
    for figure in ablation.figures:
        if figure.name not in drawn:
            _picture(folder, figure.name).unlink(missing_ok=True)
    write_csv(folder / "results.csv", results)
    atomic_write_json(folder / "verdicts.json", _plain(verdicts))
    links = {name: f"{FIGURES}/{name}.png" for name in sorted(drawn)}
    atomic_write_text(folder / "table.md", "# Ablation\n\n" + write_page(ablation, results, verdicts, links))
    if docs is not None:
        links = {name: (DOCS_FIGURES / f"{name}.png").as_posix() for name in sorted(drawn)}
        text = insert(docs.read_text(encoding="utf-8"), write_page(ablation, results, verdicts, links), str(docs))
        for name, link in links.items():
            _copy(_picture(folder, name), docs.parent / link)
        atomic_write_text(docs, text)
    return verdicts


def _picture(folder: Path, name: str) -> Path:
    return folder / FIGURES / f"{name}.png"


def _copy(source: Path, target: Path) -> None:
    """A copy that is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.part")
    building.write_bytes(source.read_bytes())
    os.replace(building, target)


def _plain(verdicts: dict[str, list[Verdict]]) -> dict[str, list[dict[str, object]]]:
    return {
        name: [
            {
                "claim": verdict.says,
                "verdict": str(verdict.outcome),
                "evidence": [
                    {"expected": item.expected, "measured": item.measured, "verdict": str(item.outcome)}
                    for item in verdict.evidence
                ],
            }
            for verdict in group
        ]
        for name, group in verdicts.items()
    }

"""Everything that is written at the end of an ablation, from its runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlhf_core.config.ablation import Ablation
from rlhf_core.evaluation.ablation.figures import draw_figure
from rlhf_core.evaluation.ablation.intervals import SeedTable
from rlhf_core.evaluation.ablation.page import insert, write_page
from rlhf_core.evaluation.ablation.results import AblationRun, read_results, write_csv
from rlhf_core.evaluation.ablation.verdicts import ClaimVerdict, judge_claim
from rlhf_core.storage.files import atomic_write_json, atomic_write_text

FIGURES = "figures"
DOCS_FIGURES = Path("..") / ".." / "docs" / "images" / "ablation"  # seen from benchmarks/results


def summarise(
    ablation: Ablation, runs: Iterable[AblationRun], folder: Path, docs: Path | None = None
) -> dict[str, list[ClaimVerdict]]:
    """Write ``results.csv``, ``verdicts.json``, ``table.md`` and ``figures/`` into ``folder``.

    Args:
        ablation: The definition.
        runs: All runs, finished or not.
        folder: Where the files go.
        docs: A page two folders down that gets the same text between its markers; ``docs/images/ablation`` gets the
            figures.

    Returns:
        The verdicts by figure.
    """
    results = read_results(runs)
    table = SeedTable(results)
    verdicts = {figure.name: [judge_claim(claim, table) for claim in figure.claims] for figure in ablation.figures}
    drawn = []
    for figure in ablation.figures:
        picture = folder / FIGURES / f"{figure.name}.png"
        if draw_figure(picture, figure, results):
            drawn.append(figure.name)
        else:
            picture.unlink(missing_ok=True)
    write_csv(folder / "results.csv", results)
    atomic_write_json(folder / "verdicts.json", _as_json(verdicts))
    links = {name: f"{FIGURES}/{name}.png" for name in drawn}
    atomic_write_text(folder / "table.md", "# Ablation\n\n" + write_page(ablation, results, verdicts, links))
    if docs is not None:
        links = {name: (DOCS_FIGURES / f"{name}.png").as_posix() for name in drawn}
        page = insert(docs.read_text(encoding="utf-8"), write_page(ablation, results, verdicts, links), str(docs))
        for name, link in links.items():
            _copy_atomically(folder / FIGURES / f"{name}.png", Path(os.path.normpath(docs.parent / link)))
        atomic_write_text(docs, page)
    return verdicts


def _copy_atomically(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    partial.write_bytes(source.read_bytes())
    os.replace(partial, target)


def _as_json(verdicts: dict[str, list[ClaimVerdict]]) -> dict[str, list[dict[str, object]]]:
    return {
        figure: [
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
        for figure, group in verdicts.items()
    }

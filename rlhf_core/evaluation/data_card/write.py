"""Write the data card and the findings that it summarises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import write_table
from rlhf_core.data.validation.check_set import findings_table
from rlhf_core.evaluation.data_card.card import DataCard, markdown
from rlhf_core.evaluation.data_card.page import page
from rlhf_core.storage.files import atomic_dir

TITLE = "Data card"
FINDINGS_FILE = "findings.parquet"


def write_card(folder: Path, card: DataCard, findings: Sequence[RowFinding]) -> None:
    """Write ``card.html``, ``card.md``, ``release.md`` (without texts of the data) and ``findings.parquet``."""
    with atomic_dir(folder) as target:
        (target / "card.html").write_text(page(card, TITLE), encoding="utf-8")
        (target / "card.md").write_text(markdown(card, TITLE, quotes=True), encoding="utf-8")
        (target / "release.md").write_text(markdown(card, TITLE, quotes=False), encoding="utf-8")
        write_table(target / FINDINGS_FILE, findings_table(findings))

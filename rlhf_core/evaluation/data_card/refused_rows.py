"""Examples of refused rows for a page that people pass on: what looks like a key is taken out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from rlhf_core.data.safe_text import excerpt
from rlhf_core.data.validation.stored_rows import Quarantined
from rlhf_core.data.validation.suites import NOT_DERIVED
from rlhf_core.evaluation.data_card.card import CardSection, CardTable

EXAMPLES = 10


def refused_section(quarantined: Iterable[Quarantined]) -> CardSection:
    """Return ten refused rows of the sources, as many different reasons as possible first."""
    spread = spread_over_reasons(quarantined, EXAMPLES)
    rows = [
        (row.kind, f"{row.source}:{row.position}" if row.source else row.id, "; ".join(row.reasons), row.row)
        for row in spread.rows
    ]
    note = f"Rows in the quarantine: {spread.total}. All are in data/quarantine.parquet, with every reason."
    tables = [CardTable(("kind", "row", "reasons", "content"), rows)] if rows else []
    return CardSection("Refused rows", [note], tables, quotes_rows=True)


@dataclass(frozen=True)
class SpreadRows:
    """Rows chosen from a quarantine, each with the beginning of its content alone, and how many there are in all."""

    rows: list[Quarantined]
    total: int


def spread_over_reasons(quarantined: Iterable[Quarantined], count: int) -> SpreadRows:
    """Choose the first row of each kind and reason, then the second of each, and so on, until there are ``count``.

    A row of a file is chosen once, not again as a row of a kind that is derived from it.
    """
    total = 0
    groups: dict[tuple[str, str], list[Quarantined]] = {}
    origins: set[tuple[str, int | None]] = set()
    for row in quarantined:
        total += 1
        origin = row.source or row.id, row.position
        if NOT_DERIVED in row.reasons or origin in origins:
            continue
        group = groups.setdefault((row.kind, row.reasons[0] if row.reasons else ""), [])
        if len(group) < count:
            group.append(replace(row, row=excerpt(row.row)))
            origins.add(origin)
    chosen = (group[rank] for rank in range(count) for group in groups.values() if rank < len(group))
    return SpreadRows(list(islice(chosen, count)), total)

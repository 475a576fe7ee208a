"""Examples of refused rows for a page that people pass on: what looks like a key is taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_core.data.validation.checks import SECRETS
from rlhf_core.data.validation.quarantine import Quarantined
from rlhf_core.evaluation.data_card.card import CardSection, CardTable

EXAMPLES = 10
EXCERPT = 160
_SECRET = re.compile(SECRETS)


def refused_section(quarantined: Sequence[Quarantined]) -> CardSection:
    """Return ten refused rows, as many different reasons as possible first."""
    rows = [
        (row.kind, f"{row.source}:{row.position}" if row.source else row.id, "; ".join(row.reasons), excerpt(row.row))
        for row in spread_over_reasons(quarantined, EXAMPLES)
    ]
    note = f"Rows in the quarantine: {len(quarantined)}. All are in data/quarantine.parquet, with every reason."
    tables = [CardTable(("kind", "row", "reasons", "content"), rows)] if rows else []
    return CardSection("Refused rows", [note], tables, quotes_rows=True)


def spread_over_reasons(quarantined: Sequence[Quarantined], count: int) -> list[Quarantined]:
    """Choose the first row of each kind and reason, then the second of each, and so on."""
    groups: dict[tuple[str, str], list[Quarantined]] = {}
    for row in quarantined:
        groups.setdefault((row.kind, row.reasons[0] if row.reasons else ""), []).append(row)
    rounds = max(map(len, groups.values()), default=0)
    chosen = (group[rank] for rank in range(min(rounds, count)) for group in groups.values() if rank < len(group))
    return [row for row, _ in zip(chosen, range(count), strict=False)]


def excerpt(content: str) -> str:
    """Return the beginning of a row's content on one line, without anything that looks like a key."""
    text = " ".join(_SECRET.sub("[taken out: looks like a key]", content).split())
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"

"""Examples of rows that break a rule about the set beside those that they resemble: where they are, what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.safe_text import excerpt
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.validation.tables import Validated
from rlhf_core.evaluation.data_card.card import CardSection, CardTable

EXAMPLES_OF_A_RULE = 3


@dataclass(frozen=True)
class SimilarRows:
    """A row that breaks a rule, and what it resembles.

    Attributes:
        row: The file and line of the row, or its id where it is from no file.
        text: How the row begins.
        other: What it resembles, likewise: another row, the line of an evaluation file, or what the rule expects.
        other_text: How the other row begins; empty where it is none of the data.
    """

    finding: RowFinding
    row: str
    text: str
    other: str
    other_text: str


def similar_rows(findings: Sequence[RowFinding], validated: Validated) -> list[SimilarRows]:
    """Return the first findings of each rule with the places and texts of both rows."""
    listed: Counter[str] = Counter()
    examples = []
    for finding in findings:
        if listed[finding.rule] < EXAMPLES_OF_A_RULE:
            examples.append(finding)
        listed[finding.rule] += 1
    rows = _rows({row_id for finding in examples for row_id in (finding.id, finding.other)}, validated)
    similar = []
    for finding in examples:
        row, other = rows.get(finding.id), rows.get(finding.other)
        origin = f"{finding.source}:{finding.position}" if finding.source else finding.id
        other_origin, other_text = other or (finding.other, "")
        similar.append(SimilarRows(finding, origin, row[1] if row else "", other_origin, other_text))
    return similar


def similar_section(similar: Sequence[SimilarRows]) -> list[CardSection]:
    """Return the section that quotes the beginnings of similar rows, if there are any."""
    rows = [(pair.row, pair.text, pair.other, pair.other_text) for pair in similar if pair.other_text]
    if not rows:
        return []
    table = CardTable(("row", "begins", "similar to", "begins"), rows)
    return [CardSection("Similar rows", ["The beginnings of the examples above."], [table], quotes_rows=True)]


def _rows(ids: Collection[str], validated: Validated) -> dict[str, tuple[str, str]]:
    """Return the place and the beginning of every row with one of these ids; of copies the first."""
    rows: dict[str, tuple[str, str]] = {}
    wanted = pa.array(sorted(ids), pa.string())
    for kind, stored in validated.raw.rows.items() if ids else ():
        parts = [pc.is_in(part.column("id"), value_set=wanted).to_numpy() for part in stored.parts(["id"])]
        if not any(part.any() for part in parts):
            continue
        chosen = stored.where(np.concatenate(parts))
        contents = (row for part in chosen.parts(["id", *CONTENT_FIELDS[kind]]) for row in part.to_pylist())
        origins = validated.raw.origins.get(kind)
        for number, row in zip(chosen.numbers, contents, strict=True):
            origin = origins[int(number)] if origins is not None else None
            texts = [turn["content"] for turn in row.get("prompt") or () if turn["role"] != "system"]
            texts += [row[name] for name in CONTENT_FIELDS[kind] if name != "prompt"]
            location = f"{origin.source}:{origin.position}" if origin else row["id"]
            rows.setdefault(row["id"], (location, excerpt("\n".join(texts))))
    return rows

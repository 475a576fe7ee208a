"""Near duplicates: rows whose content resembles that of an earlier row of their kind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlhf_core.config.data import NearDuplicatesConfig
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.validation.set_rules.minhash import SimilarTexts
from rlhf_core.data.validation.set_rules.set_rows import SetRows

RULE = "no_near_duplicates"


@dataclass(frozen=True)
class NearDuplicates:
    """Rows that resemble an earlier one, and by kind how many rows were compared."""

    breaches: list[RowFinding]
    compared: dict[str, int]


def near_duplicates(rows: SetRows, kinds: Collection[str], config: NearDuplicatesConfig) -> NearDuplicates:
    """Compare the prompt and replies of each row with those of the earlier rows of its kind.

    Pairs of one ranking share their prompt and some of their replies by design, and are not compared with each other.

    The time is linear in rows. What is found is an estimate: the hashing misses some pairs near the limit and finds
    some a little below it. A row that is nearly a copy itself is not compared with later ones, which are compared with
    its original.
    """
    breaches: list[RowFinding] = []
    compared: dict[str, int] = {}
    for kind in kinds:
        index = SimilarTexts(config)
        ids: list[str] = []
        ranking: object = None
        of_ranking: set[int] = set()
        for row in rows.of(kind):
            if row.number == config.max_rows:
                break
            ids.append(row.id)
            if (row.origin, row.turns) != ranking:
                ranking, of_ranking = (row.origin, row.turns), set()
            signature = index.signature(row.text)
            similar = index.most_similar(signature, of_ranking)
            if similar is None:
                index.add(row.number, signature)
                if row.origin is not None and row.turns:
                    of_ranking.add(row.number)
            else:
                reason = "nearly a copy of an earlier row"
                other, similarity = ids[similar.key], similar.similarity
                breaches.append(RowFinding(RULE, kind, reason, number=row.number, other=other, similarity=similarity))
        compared[kind] = len(ids)
    return NearDuplicates(breaches, compared)

"""Leakage by wording: prompts of training that are nearly the same as a held-out one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from datasketch import MinHash

from rlhf_core.config.data import NearDuplicatesConfig
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.validation.set_rules.minhash import SimilarTexts
from rlhf_core.data.validation.set_rules.set_rows import SPLIT_PARTS, USER_PARTS, SetRows

RULE = "no_similar_held_out_prompts"


@dataclass
class PromptUses:
    """A distinct prompt: the signature of its text, and the rows that have it by order of parts and part."""

    id: str
    signature: MinHash
    rows: dict[tuple[str, int], list[tuple[str, int]]] = field(default_factory=dict)


def similar_prompts(rows: SetRows, config: NearDuplicatesConfig) -> list[RowFinding]:
    """Compare every distinct prompt with those of the parts that are held out from its own: splits, users of pairs.

    The time is linear in prompts, of which at most ``config.max_rows`` are looked at. Prompts that are equal are no
    matter of this rule: they share a group, and splits are by group.
    """
    signer = SimilarTexts(config)
    prompts: dict[tuple[str, ...], PromptUses] = {}
    for row in rows.with_prompts():
        if row.turns not in prompts:
            if len(prompts) == config.max_rows:
                continue
            prompts[row.turns] = PromptUses(row.id, signer.signature("\n".join(row.turns)))
        uses = [("split", row.split)] if row.user is None else [("split", row.split), ("user", row.user)]
        for use in uses:
            prompts[row.turns].rows.setdefault(use, []).append((row.kind, row.number))
    listed = list(prompts.values())
    return [
        *_between_parts("split", SPLIT_PARTS, listed, config),
        *_between_parts("user", USER_PARTS, listed, config),
    ]


def _between_parts(
    order: str, parts: tuple[str, ...], prompts: list[PromptUses], config: NearDuplicatesConfig
) -> Iterator[RowFinding]:
    """Yield the rows whose prompt resembles one of an earlier part; the parts are in order, the most held-out first."""
    index = SimilarTexts(config)
    part_of: dict[int, int] = {}
    for part in range(len(parts)):
        new = {n: uses for n, uses in enumerate(prompts) if (order, part) in uses.rows and n not in part_of}
        for uses in new.values():
            similar = index.most_similar(uses.signature)
            if similar is None:
                continue
            reason = f"the prompt is nearly the same as one of {parts[part_of[similar.key]]}"
            for kind, row in uses.rows[order, part]:
                other, similarity = prompts[similar.key].id, similar.similarity
                yield RowFinding(RULE, kind, reason, number=row, other=other, similarity=similarity)
        for number, uses in new.items():
            part_of[number] = part
            index.add(number, uses.signature)

"""Leakage by conversation: prompts of training that begin as a held-out dialogue does, or the other way round.

Splits keep equal prompts together, but a dialogue and its own beginning are different prompts. A model that is trained
on the one has seen turns of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.validation.set_rules.set_rows import SPLIT_PARTS, USER_PARTS, SetRow, SetRows

PREFIX_RULE, FIRST_TURN_RULE = "no_prefix_leakage", "no_shared_first_turn"


@dataclass(slots=True)
class Range:
    """Which parts have a dialogue, as positions in their order; ``id`` is a row of the most held-out one."""

    first: int
    id: str
    last: int


@dataclass
class DialogueIndex:
    """Dialogues of the parts of one order (splits, or users of pairs), by hashes of their turns.

    Attributes:
        whole: By the hash of a whole prompt, the parts that have it.
        beginnings: By the hash of the turns up to a user's, the parts with a prompt that begins so or is so.
    """

    whole: dict[int, Range] = field(default_factory=dict)
    beginnings: dict[int, Range] = field(default_factory=dict)

    def add(self, hashes: Sequence[int], part: int, row_id: str) -> None:
        """Add a prompt by the hashes of its beginnings, the whole prompt last."""
        for index, keys in ((self.whole, hashes[-1:]), (self.beginnings, hashes)):
            for key in keys:
                known = index.setdefault(key, Range(part, row_id, part))
                known.last = max(known.last, part)
                if part < known.first:
                    known.first, known.id = part, row_id

    def relatives(self, hashes: Sequence[int]) -> Iterator[Range]:
        """Yield the parts with a prompt that is a beginning of this one, or that this one is a beginning of."""
        if hashes[-1] in self.beginnings:
            yield self.beginnings[hashes[-1]]
        yield from (self.whole[key] for key in hashes[:-1] if key in self.whole)


@dataclass(frozen=True)
class PrefixLeakage:
    """What was found.

    Attributes:
        breaches: Rows of training that a more held-out part shares turns with.
        held_out: By kind, the rows of split test.
        prefix: By kind, how many of them have a prompt that begins as one of training, or that one of training begins
            as.
        first_turn: By kind, how many of them share at least the first turn with one of training.
    """

    breaches: list[RowFinding]
    held_out: Counter[str]
    prefix: Counter[str]
    first_turn: Counter[str]


def beginning_hashes(turns: Iterable[str]) -> list[int]:
    """Return 64-bit hashes of the turns up to the first, third, fifth … one, each of which is the user's."""
    hashes = []
    digest = blake2b(digest_size=8)
    for number, turn in enumerate(turns):
        content = turn.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
        if number % 2 == 0:
            hashes.append(int.from_bytes(digest.digest(), "little"))
    return hashes


def prefix_leakage(rows: SetRows) -> PrefixLeakage:
    """Look up every prompt among the beginnings of all others; the time is linear in turns."""
    splits, users = DialogueIndex(), DialogueIndex()
    for row in rows.with_prompts():
        hashes = beginning_hashes(row.turns)
        if hashes:
            splits.add(hashes, row.split, row.id)
        if hashes and row.user is not None:
            users.add(hashes, row.user, row.id)
    result = PrefixLeakage([], Counter(), Counter(), Counter())
    for row in rows.with_prompts():
        hashes = beginning_hashes(row.turns)
        if not hashes:
            continue
        result.breaches.extend(_breaches(row, hashes, splits, users))
        if row.split == 0:
            result.held_out[row.kind] += 1
            result.prefix[row.kind] += any(relative.last > 0 for relative in splits.relatives(hashes))
            result.first_turn[row.kind] += splits.beginnings[hashes[0]].last > 0
    return result


def _breaches(row: SetRow, hashes: Sequence[int], splits: DialogueIndex, users: DialogueIndex) -> Iterator[RowFinding]:
    """Yield at most one breach of each rule: the one with the most held-out part."""
    orders = [(splits, row.split, SPLIT_PARTS)]
    if row.user is not None:
        orders.append((users, row.user, USER_PARTS))
    for rule, what in (
        (PREFIX_RULE, "the prompt and one of {part} begin alike, and one of them ends there"),
        (FIRST_TURN_RULE, "the first turn is also that of a prompt of {part}"),
    ):
        for index, part, names in orders:
            shared = list(index.relatives(hashes)) if rule == PREFIX_RULE else [index.beginnings[hashes[0]]]
            held_out = [relative for relative in shared if relative.first < part]
            if held_out:
                nearest = min(held_out, key=lambda relative: relative.first)
                reason = what.format(part=names[nearest.first])
                yield RowFinding(rule, row.kind, reason, number=row.number, other=nearest.id)
                break

"""The rows of a whole set, and the rules about languages and prefixes that only a set can break.

Leakage by conversation: prompts of training that begin as a held-out dialogue does, or the other way round.

Splits keep equal prompts together, but a dialogue and its own beginning are different prompts. A model that is trained
on the one has seen turns of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.splits import SPLITS, PairUser, assign, pair_user_of
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.errors import ConfigError

# The parts of each order, the most held-out one first. A row is at fault if it resembles one of an earlier part.
SPLIT_ORDER = tuple(reversed(SPLITS))
USER_ORDER = (PairUser.JUDGE, PairUser.REFEREE, PairUser.REWARD)
PARTS = {
    "split": tuple(f"split {split}" for split in SPLIT_ORDER),
    "user": ("the judge's pairs", "the referee's pairs", "the reward model's pairs"),
}


@dataclass(frozen=True)
class SetRow:
    """A clean row.

    Attributes:
        number: Its position among the raw rows of its kind.
        parts: By order, the position of its part in ``PARTS``; test pairs and other kinds have none as to users.
        turns: The prompt's turns without system turns, casefolded, with white space collapsed.
        text: The whole content: prompt and replies, or the text.
        origin: File and line of the record that gave the row, and perhaps others (a ranking); empty without a file.
    """

    kind: str
    number: int
    id: str
    parts: Mapping[str, int]
    turns: tuple[str, ...]
    text: str
    origin: Mapping[str, Any]

    def finding(self, rule: str, reason: str, other: str = "", similarity: float | None = None) -> RowFinding:
        """The row breaks a rule; ``other`` is what it resembles."""
        return RowFinding(
            rule, self.kind, reason, **self.origin, id=self.id, number=self.number, other=other, similarity=similarity
        )


@dataclass(frozen=True)
class SetRows:
    """The clean rows of all kinds, which can be read again and again in parts."""

    clean: Mapping[str, StoredRows]
    seed: int
    split: SplitConfig

    def of(self, kind: str) -> Iterator[SetRow]:
        """Yield the rows of a kind in order."""
        clean, numbers = self.clean[kind], iter(self.clean[kind].numbers.tolist())
        for part in clean.parts(["id", "group", *CONTENT_FIELDS[kind]]):
            splits = assign(part.column("group").to_pylist(), self.seed, self.split)
            for row, split in zip(part.to_pylist(), splits, strict=True):
                turns = [turn["content"] for turn in row.get("prompt") or () if turn["role"] != "system"]
                replies = [row[name] for name in CONTENT_FIELDS[kind] if name != "prompt"]
                parts, number = {"split": SPLIT_ORDER.index(split)}, next(numbers)
                if kind == "preferences" and split != "test":
                    parts["user"] = USER_ORDER.index(pair_user_of(row["group"], self.seed, self.split))
                compared = tuple(" ".join(turn.casefold().split()) for turn in turns)
                text = "\n".join([*turns, *replies])
                yield SetRow(kind, number, row["id"], parts, compared, text, clean.origin(number))

    def with_prompts(self) -> Iterator[SetRow]:
        """Yield the rows of all kinds that have prompts."""
        for kind in self.clean:
            if "prompt" in CONTENT_FIELDS[kind]:
                yield from self.of(kind)


LANGUAGE = "expected_language"
CHARACTERS = 1000
# Shorter texts say too little: of one-word texts most are taken for the wrong language.
FEWEST_CHARACTERS = 40
VARIANTS = {"wuu": "zh", "yue": "zh"}
UNKNOWN = "unknown"


def languages(
    rows: SetRows, kinds: Iterable[str], expected: Collection[str]
) -> tuple[list[RowFinding], dict[str, Counter[str]]]:
    """Identify the language of every row of ``kinds``; texts below 40 characters count as unknown and pass.

    Returns:
        Rows of another language than expected, and by kind how many rows are of each language.

    Raises:
        ConfigError: py3langid is not installed, or it does not know a language of ``expected``.
    """
    identifier = _identifier(expected)
    breaches: list[RowFinding] = []
    counts: dict[str, Counter[str]] = {}
    for kind in kinds:
        of_kind = counts.setdefault(kind, Counter())
        for row in rows.of(kind):
            text = row.text[:CHARACTERS]
            language = UNKNOWN
            if len(text) >= FEWEST_CHARACTERS:
                name = str(identifier.classify(text)[0])
                language = VARIANTS.get(name, name)
            of_kind[language] += 1
            if language != UNKNOWN and language not in expected:
                breaches.append(row.finding(LANGUAGE, f"looks like language {language}", ", ".join(sorted(expected))))
    return breaches, counts


def _identifier(expected: Collection[str]) -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            "validate.languages needs py3langid: pip install 'rlhf-pipeline[language]', or leave the list empty"
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    unknown = sorted(set(expected) - set(identifier.labels))
    if unknown:
        raise ConfigError(
            f"validate.languages: {unknown[0]} is no language that is told apart; known are "
            f"{', '.join(sorted(identifier.labels))}"
        )
    return identifier


PREFIX_RULE, FIRST_TURN_RULE = "no_prefix_leakage", "no_shared_first_turn"


@dataclass(slots=True)
class Range:
    """Which parts have a dialogue, as positions in their order; ``id`` is a row of the most held-out one."""

    first: int
    id: str
    last: int


class DialogueIndex:
    """Which parts of an order have a dialogue, by hashes of its turns."""

    def __init__(self) -> None:
        self.whole: dict[int, Range] = {}  # by the hash of a whole prompt
        self.beginnings: dict[int, Range] = {}  # by that of the turns up to a user's: prompts that begin so or are so

    def add(self, hashes: Sequence[int], part: int, row_id: str) -> None:
        """Add a prompt by the hashes of its beginnings, the whole prompt last."""
        for index, keys in ((self.whole, hashes[-1:]), (self.beginnings, hashes)):
            for key in keys:
                known = index.setdefault(key, Range(part, row_id, part))
                known.last = max(known.last, part)
                if part < known.first:
                    known.first, known.id = part, row_id

    def relatives(self, hashes: Sequence[int]) -> list[Range]:
        """Return the parts with a prompt that is a beginning of this one, or that this one is a beginning of."""
        longer = [self.beginnings[hashes[-1]]] if hashes[-1] in self.beginnings else []
        return longer + [self.whole[key] for key in hashes[:-1] if key in self.whole]


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


def prefix_leakage(rows: SetRows) -> tuple[list[RowFinding], dict[str, dict[str, float]]]:
    """Look up every prompt among the beginnings of all others; the time is linear in turns.

    Returns:
        Rows of training that a more held-out part shares turns with, and counts by kind of the test rows with a prompt
        that begins as one of training or that one of training begins as, and of those that share the first turn.
    """
    indexes = {order: DialogueIndex() for order in PARTS}
    for row in rows.with_prompts():
        if hashes := beginning_hashes(row.turns):
            for order, part in row.parts.items():
                indexes[order].add(hashes, part, row.id)
    breaches: list[RowFinding] = []
    counts: dict[str, dict[str, float]] = {}
    splits = indexes["split"]
    for row in rows.with_prompts():
        hashes = beginning_hashes(row.turns)
        of_kind = counts.setdefault(row.kind, {"test_prefix_leaks": 0.0, "test_first_turn_leaks": 0.0})
        if hashes:
            breaches.extend(_breaches(row, hashes, indexes))
            if row.parts["split"] == 0:
                of_kind["test_prefix_leaks"] += any(relative.last > 0 for relative in splits.relatives(hashes))
                of_kind["test_first_turn_leaks"] += splits.beginnings[hashes[0]].last > 0
    return breaches, counts


def _breaches(row: SetRow, hashes: Sequence[int], indexes: Mapping[str, DialogueIndex]) -> Iterator[RowFinding]:
    """Yield at most one breach of each rule: the one with the most held-out part."""
    for rule, what in (
        (PREFIX_RULE, "the prompt and one of {part} begin alike, and one of them ends there"),
        (FIRST_TURN_RULE, "the first turn is also that of a prompt of {part}"),
    ):
        for order, part in row.parts.items():
            index = indexes[order]
            shared = index.relatives(hashes) if rule == PREFIX_RULE else [index.beginnings[hashes[0]]]
            nearest = min(shared, key=lambda relative: relative.first)  # the row itself is among them
            if nearest.first < part:
                yield row.finding(rule, what.format(part=PARTS[order][nearest.first]), nearest.id)
                break

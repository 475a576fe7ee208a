"""The rows of a whole set, and the rules about languages and prefixes that only a set can break.

Leakage by conversation: prompts of training that begin as a held-out dialogue does, or the other way round.

Splits keep equal prompts together, but a dialogue and its own beginning are different prompts. A model that is trained
on the one has seen turns of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.splits import SPLITS, PairUser, assign, pair_user_of
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.errors import ConfigError

# The most held-out part first. A row is at fault if it resembles one of an earlier part.
SPLIT_ORDER = tuple(reversed(SPLITS))
USER_ORDER = (PairUser.JUDGE, PairUser.REFEREE, PairUser.REWARD)
SPLIT_PARTS = tuple(f"split {split}" for split in SPLIT_ORDER)
USER_PARTS = ("the judge's pairs", "the referee's pairs", "the reward model's pairs")


@dataclass(frozen=True)
class SetRow:
    """A clean row.

    Attributes:
        number: Its position among the clean rows of its kind.
        split: Position of its split in ``SPLIT_ORDER``.
        user: Position in ``USER_ORDER`` of the model that the pair belongs to; None for test pairs and other kinds.
        turns: The prompt's turns without system turns, casefolded, with white space collapsed.
        text: The whole content: prompt and replies, or the text.
        origin: File and line of the record that gave the row, and perhaps others (a ranking); empty without a file.
    """

    kind: str
    number: int
    id: str
    split: int
    user: int | None
    turns: tuple[str, ...]
    text: str
    origin: Mapping[str, Any] = field(default_factory=dict)

    def finding(self, rule: str, reason: str, other: str = "", similarity: float | None = None) -> RowFinding:
        """The row breaks a rule; ``other`` is what it resembles."""
        return RowFinding(rule, self.kind, reason, number=self.number, other=other, similarity=similarity)


@dataclass(frozen=True)
class SetRows:
    """The clean rows of all kinds, which can be read again and again in parts."""

    clean: Mapping[str, StoredRows]
    seed: int
    split: SplitConfig

    def of(self, kind: str) -> Iterator[SetRow]:
        """Yield the rows of a kind in order."""
        number = 0
        clean, raw_numbers = self.clean[kind], self.clean[kind].numbers
        for part in clean.parts(["id", "group", *CONTENT_FIELDS[kind]]):
            rows = part.to_pylist()
            groups = [row["group"] for row in rows]
            for row, group, split in zip(rows, groups, assign(groups, self.seed, self.split), strict=True):
                prompt = row.get("prompt") or []
                turns = [turn["content"] for turn in prompt if turn["role"] != "system"]
                replies = [row[name] for name in CONTENT_FIELDS[kind] if name != "prompt"]
                yield SetRow(
                    kind,
                    number,
                    row["id"],
                    SPLIT_ORDER.index(split),
                    self._user(group) if kind == "preferences" and split != "test" else None,
                    tuple(" ".join(turn.casefold().split()) for turn in turns),
                    "\n".join([*turns, *replies]),
                    clean.origin(raw_numbers[number]),
                )
                number += 1

    def with_prompts(self) -> Iterator[SetRow]:
        """Yield the rows of all kinds that have prompts."""
        for kind in self.clean:
            if "prompt" in CONTENT_FIELDS[kind]:
                yield from self.of(kind)

    def _user(self, group: str) -> int:
        return USER_ORDER.index(pair_user_of(group, self.seed, self.split))


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
    splits, users = DialogueIndex(), DialogueIndex()
    for row in rows.with_prompts():
        hashes = beginning_hashes(row.turns)
        if hashes:
            splits.add(hashes, row.split, row.id)
        if hashes and row.user is not None:
            users.add(hashes, row.user, row.id)
    breaches: list[RowFinding] = []
    counts: dict[str, dict[str, float]] = {}
    for row in rows.with_prompts():
        hashes = beginning_hashes(row.turns)
        of_kind = counts.setdefault(row.kind, {"test_prefix_leaks": 0.0, "test_first_turn_leaks": 0.0})
        if not hashes:
            continue
        breaches.extend(_breaches(row, hashes, splits, users))
        if row.split == 0:
            of_kind["test_prefix_leaks"] += any(relative.last > 0 for relative in splits.relatives(hashes))
            of_kind["test_first_turn_leaks"] += splits.beginnings[hashes[0]].last > 0
    return breaches, counts


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
                yield row.finding(rule, what.format(part=names[nearest.first]), nearest.id)
                break

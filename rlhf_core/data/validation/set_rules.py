"""The rules that only a whole set of rows can break.

Leakage by conversation: prompts of training that begin as a held-out dialogue does, or the other
way round. Splits keep equal prompts together, but a dialogue and its own beginning are different
prompts. A model that is trained on the one has seen turns of the other.

Texts that resemble each other: copies of rows, and prompts of training that resemble held-out ones
(:mod:`rlhf_core.data.validation.similar_texts`).

Contamination: rows of training whose prompt is one of an evaluation set, or holds a part of one.

As for GPT-3 (Brown et al., 2020, appendix C), a run of 13 words in common counts. Evaluation
prompts that are shorter count where a turn is the same text, and prompts of any length where they
are nearly the same by MinHash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from datasketch import MinHash

from rlhf_core.config.data import NearDuplicatesConfig, SplitConfig, ValidateConfig
from rlhf_core.data.collection.raw_folder import StoredRows
from rlhf_core.data.collection.rows import FileRows, casefolded, texts_of_turns
from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, SPLITS, PairUser, assign, pair_user_of
from rlhf_core.data.text import split_words
from rlhf_core.data.validation.similar_texts import SimilarTexts, shingle_hashes
from rlhf_core.data.validation.suites import SET, Suites
from rlhf_core.data.validation.tables import Validated, found_column
from rlhf_core.errors import ConfigError

# The parts of each order, the most held-out one first. A row is at fault if it resembles one of an
# earlier part.
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
        parts: By order, the position of its part in ``PARTS``; test pairs and other kinds have none
            as to users.
        turns: The prompt's turns without system turns, casefolded, with white space collapsed.
        text: The whole content: prompt and replies, or the text.
        origin: File and line of the record that gave the row, and perhaps others (a ranking); empty
            without a file.
    """

    kind: str
    number: int
    id: str
    parts: Mapping[str, int]
    turns: tuple[str, ...]
    text: str
    origin: Mapping[str, Any]

    def finding(
        self, rule: str, reason: str, other: str = "", similarity: float | None = None
    ) -> RowFinding:
        """Return the finding that the row breaks a rule; ``other`` is what it resembles."""
        return RowFinding(
            rule,
            self.kind,
            reason,
            **self.origin,
            id=self.id,
            number=self.number,
            other=other,
            similarity=similarity,
        )


@dataclass(frozen=True)
class SetRows:
    """The clean rows of all kinds, which can be read again and again in parts."""

    clean: Mapping[str, StoredRows]
    seed: int
    split: SplitConfig

    def of(self, kind: str) -> Iterator[SetRow]:
        """Yield the rows of a kind in order."""
        clean = self.clean[kind]
        numbers = iter(clean.numbers.tolist())
        content = CONTENT_FIELDS[kind]
        for part in clean.parts(["id", "group", *content]):
            splits = assign(part.column("group").to_pylist(), self.seed, self.split)
            for row, split in zip(part.to_pylist(), splits, strict=True):
                number = next(numbers)
                turns = texts_of_turns(row.get("prompt") or ())
                replies = [row[name] for name in content if name != "prompt"]
                parts = {"split": SPLIT_ORDER.index(split)}
                if kind == "preferences" and split != "test":
                    user = pair_user_of(row["group"], self.seed, self.split)
                    parts["user"] = USER_ORDER.index(user)
                compared = tuple(map(casefolded, turns))
                text = "\n".join([*turns, *replies])
                origin = clean.origin(number)
                yield SetRow(kind, number, row["id"], parts, compared, text, origin)

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
    """Identify the language of every row; texts below 40 characters count as unknown and pass.

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
                name, _ = identifier.classify(text)
                language = VARIANTS.get(str(name), str(name))
            of_kind[language] += 1
            if language != UNKNOWN and language not in expected:
                wanted = ", ".join(sorted(expected))
                finding = row.finding(LANGUAGE, f"looks like language {language}", wanted)
                breaches.append(finding)
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


PREFIX_RULE = "no_prefix_leakage"
FIRST_TURN_RULE = "no_shared_first_turn"


@dataclass(slots=True)
class Range:
    """Which parts have a dialogue, as positions in their order.

    Attributes:
        first: The most held-out one.
        id: A row of that one.
        last: The least held-out one.
    """

    first: int
    id: str
    last: int


class DialogueIndex:
    """An index of which parts of an order contain a dialogue, by hashes of its turns."""

    def __init__(self) -> None:
        # By the hash of a whole prompt, and by that of the turns up to a user's, with which prompts
        # begin, or which they are.
        self.whole: dict[int, Range] = {}
        self.beginnings: dict[int, Range] = {}

    def add(self, hashes: Sequence[int], part: int, row_id: str) -> None:
        """Add a prompt by the hashes of its beginnings, the whole prompt last."""
        ranges = [self.whole.setdefault(hashes[-1], Range(part, row_id, part))]
        for key in hashes:
            ranges.append(self.beginnings.setdefault(key, Range(part, row_id, part)))
        for known in ranges:
            known.last = max(known.last, part)
            if part < known.first:
                known.first = part
                known.id = row_id

    def relatives(self, hashes: Sequence[int]) -> list[Range]:
        """Return the parts with a prompt that begins as this one, or that this one begins as."""
        *shorter, own = hashes
        relatives = []
        if own in self.beginnings:
            relatives.append(self.beginnings[own])
        for key in shorter:
            if key in self.whole:
                relatives.append(self.whole[key])
        return relatives


def beginning_hashes(turns: Iterable[str]) -> list[int]:
    """Return 64-bit hashes of the turns up to each of the user's, which is every other one."""
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
        Rows of training that a more held-out part shares turns with, and counts by kind of the test
        rows with a prompt that begins as one of training or that one of training begins as, and of
        those that share the first turn.
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
        of_kind = counts.setdefault(
            row.kind, {"test_prefix_leaks": 0.0, "test_first_turn_leaks": 0.0}
        )
        if hashes:
            breaches.extend(_breaches(row, hashes, indexes))
            if row.parts["split"] == 0:
                relatives = splits.relatives(hashes)
                same_first_turn = splits.beginnings[hashes[0]]
                of_kind["test_prefix_leaks"] += any(relative.last > 0 for relative in relatives)
                of_kind["test_first_turn_leaks"] += same_first_turn.last > 0
    return breaches, counts


def _breaches(
    row: SetRow, hashes: Sequence[int], indexes: Mapping[str, DialogueIndex]
) -> Iterator[RowFinding]:
    """Yield at most one breach of each rule: the one with the most held-out part."""
    for rule, what in (
        (PREFIX_RULE, "the prompt and one of {part} begin alike, and one of them ends there"),
        (FIRST_TURN_RULE, "the first turn is also that of a prompt of {part}"),
    ):
        for order, part in row.parts.items():
            index = indexes[order]
            shared = [index.beginnings[hashes[0]]]
            if rule == PREFIX_RULE:
                shared = index.relatives(hashes)
            # The row itself is among them.
            nearest = min(shared, key=lambda relative: relative.first)
            if nearest.first < part:
                reason = what.format(part=PARTS[order][nearest.first])
                yield row.finding(rule, reason, nearest.id)
                break


NEAR_DUPLICATES = "no_near_duplicates"


def near_duplicates(
    rows: SetRows, kinds: Collection[str], config: NearDuplicatesConfig
) -> tuple[list[RowFinding], dict[str, int]]:
    """Return rows that resemble an earlier one, and by kind how many rows were compared.

    The prompt and replies of each row are compared with those of the earlier rows of its kind.
    Pairs of one ranking share their prompt and some of their replies by design, and are not
    compared with each other.

    The time is linear in rows. What is found is an estimate: the hashing misses some pairs near the
    limit and finds some a little below it. A row that is nearly a copy itself is not compared with
    later ones, which are compared with its original.
    """
    breaches: list[RowFinding] = []
    compared: dict[str, int] = {}
    for kind in kinds:
        index = SimilarTexts(config)
        ids: dict[int, str] = {}
        ranking: object = None
        of_ranking: set[int] = set()
        for row in rows.of(kind):
            if len(ids) == config.max_rows:
                break
            ids[row.number] = row.id
            if (row.origin, row.turns) != ranking:
                ranking = (row.origin, row.turns)
                of_ranking = set()
            signature = index.signature(row.text)
            similar = index.most_similar(signature, of_ranking)
            if similar is None:
                index.add(row.number, signature)
                if row.origin and row.turns:
                    of_ranking.add(row.number)
            else:
                key, similarity = similar
                reason = "nearly a copy of an earlier row"
                breaches.append(row.finding(NEAR_DUPLICATES, reason, ids[key], similarity))
        compared[kind] = len(ids)
    return breaches, compared


SIMILAR_PROMPTS = "no_similar_held_out_prompts"


@dataclass
class PromptUses:
    """A distinct prompt: its signature, and the rows that have it by order of parts and part."""

    id: str
    signature: MinHash
    rows: dict[tuple[str, int], list[tuple[str, int, str]]] = field(default_factory=dict)


def similar_prompts(rows: SetRows, config: NearDuplicatesConfig) -> Iterator[RowFinding]:
    """Compare every distinct prompt with those of parts that are held out from its own.

    The time is linear in prompts, of which at most ``config.max_rows`` are looked at. Prompts that
    are equal are no matter of this rule: they share a group, and splits are by group.
    """
    signer = SimilarTexts(config)
    distinct: dict[tuple[str, ...], PromptUses] = {}
    for row in rows.with_prompts():
        if row.turns not in distinct:
            if len(distinct) == config.max_rows:
                continue
            signature = signer.signature("\n".join(row.turns))
            distinct[row.turns] = PromptUses(row.id, signature)
        rows_of_part = distinct[row.turns].rows
        for named_part in row.parts.items():
            users = rows_of_part.setdefault(named_part, [])
            users.append((row.kind, row.number, row.id))
    prompts = list(distinct.values())
    for order, parts in PARTS.items():
        index = SimilarTexts(config)
        part_of: dict[int, int] = {}
        for part in range(len(parts)):
            new_prompts = {}
            for key, uses in enumerate(prompts):
                if (order, part) in uses.rows and key not in part_of:
                    new_prompts[key] = uses
            for uses in new_prompts.values():
                similar = index.most_similar(uses.signature)
                if similar is None:
                    continue
                key, similarity = similar
                reason = f"the prompt is nearly the same as one of {parts[part_of[key]]}"
                other = prompts[key].id
                for kind, number, row_id in uses.rows[order, part]:
                    origin = rows.clean[kind].origin(number)
                    yield RowFinding(
                        SIMILAR_PROMPTS,
                        kind,
                        reason,
                        **origin,
                        id=row_id,
                        number=number,
                        other=other,
                        similarity=similarity,
                    )
            for number, uses in new_prompts.items():
                part_of[number] = part
                index.add(number, uses.signature)


CONTAMINATION = "no_contamination"
RUN_OF_WORDS = 13
TEST = SPLIT_ORDER.index("test")


@dataclass
class EvaluationOverlap:
    """One evaluation file: how many prompts were read, refused, and met by a row of training."""

    source: str
    prompts: int
    refused: int
    met: set[int] = field(default_factory=set)


class EvaluationIndex:
    """Evaluation prompts, looked up by similarity and by runs of words.

    Short ones are looked up by their whole text.
    """

    def __init__(self, prompts: Sequence[Sequence[str]], config: NearDuplicatesConfig) -> None:
        self._similar = SimilarTexts(config)
        runs_of_prompts = [np.zeros(0, np.uint64)]
        owners_of_runs = [np.zeros(0, np.int64)]
        for number, turns in enumerate(prompts):
            text = "\n".join(turns)
            runs = shingle_hashes(split_words(text), RUN_OF_WORDS)
            runs_of_prompts.append(runs)
            owners_of_runs.append(np.full(len(runs), number))
            self._similar.add(number, self._similar.signature(text))
        runs = np.concatenate(runs_of_prompts)
        owners = np.concatenate(owners_of_runs)
        order = np.argsort(runs, kind="stable")
        self._runs: npt.NDArray[np.uint64] = runs[order]
        self._owners: npt.NDArray[np.int64] = owners[order]

    def shared_words(self, turns: Sequence[str]) -> int | None:
        """Return the number of an evaluation prompt with a run of words in these turns.

        Of a short prompt the whole text counts.
        """
        for text in dict.fromkeys(["\n".join(turns), *turns]):
            hashes = shingle_hashes(split_words(text), RUN_OF_WORDS)
            left = np.searchsorted(self._runs, hashes, "left")
            right = np.searchsorted(self._runs, hashes, "right")
            owners = self._owners[left[left < right]]
            if len(owners):
                return int(owners.min())
        return None

    def overlap(self, turns: Sequence[str]) -> tuple[int, str, float | None] | None:
        """Return the number of an evaluation prompt like these turns, how they agree, and how much."""
        shared = self.shared_words(turns)
        if shared is not None:
            reason = (
                f"the same text as an evaluation prompt, or {RUN_OF_WORDS} words in a row of one"
            )
            return shared, reason, None
        signature = self._similar.signature("\n".join(turns))
        similar = self._similar.most_similar(signature)
        if similar is None:
            return None
        number, similarity = similar
        return number, "nearly the same as an evaluation prompt", similarity


def contamination(
    rows: SetRows, files: Sequence[FileRows], config: NearDuplicatesConfig
) -> tuple[list[RowFinding], list[EvaluationOverlap]]:
    """Look up the prompts (of pretraining text: the texts) of all rows that are not of split test.

    Returns:
        Rows of training that overlap with evaluation prompts, and the evaluation files.
    """
    prompts: list[tuple[str, ...]] = []
    records: list[tuple[str, int]] = []
    overlaps: dict[str, EvaluationOverlap] = {}
    for file in files:
        source = file.counts.source
        overlaps[source] = EvaluationOverlap(source, file.counts.kept, file.counts.refused)
        for row, position in zip(file.rows, file.positions, strict=True):
            prompts.append(tuple(texts_of_turns(row["prompt"])))
            records.append((source, position))
    index = EvaluationIndex(prompts, config)
    # By the hash of the turns, since most prompts repeat.
    overlap_of: dict[int, tuple[int, str, float | None] | None] = {}
    breaches = []
    for kind in rows.clean:
        for clean in rows.of(kind):
            if clean.parts["split"] == TEST:
                continue
            texts = clean.turns or (clean.text,)
            key = hash(texts)
            if key not in overlap_of:
                overlap_of[key] = index.overlap(texts)
            overlap = overlap_of[key]
            if overlap is not None:
                number, reason, similarity = overlap
                source, position = records[number]
                overlaps[source].met.add(position)
                prompt = f"{source}:{position}"
                breaches.append(clean.finding(CONTAMINATION, reason, prompt, similarity))
    return breaches, list(overlaps.values())


SET_RULES = (
    PREFIX_RULE, FIRST_TURN_RULE, NEAR_DUPLICATES, SIMILAR_PROMPTS, LANGUAGE, CONTAMINATION,
)  # fmt: skip


@dataclass
class SetFindings:
    """What the rules about the whole set found in the clean rows.

    Attributes:
        breaches: Rows that break a rule which a suite asks for, in the order of rules, kinds and
            rows.
        checked: By kind, the rules that its rows were checked by.
        counts: By kind, further counts for ``metrics/data.json``.
        evaluation: The evaluation files and how much of them was met.
        languages: By kind, how many rows are of each language.
    """

    breaches: list[RowFinding] = field(default_factory=list)
    checked: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluation: list[EvaluationOverlap] = field(default_factory=list)
    languages: dict[str, Counter[str]] = field(default_factory=dict)


def check_set(
    clean: Mapping[str, StoredRows],
    config: ValidateConfig,
    suites: Suites,
    derived: Collection[str] = (),
    evaluation: Sequence[FileRows] = (),
) -> SetFindings:
    """Check the clean rows of all kinds by the rules about the whole set.

    Args:
        derived: Kinds whose rows are not compared with each other: they repeat those that they come
            from.
        evaluation: The evaluation files, read as prompts.
    """
    rows = SetRows(clean, config.seed, config.split)
    findings = SetFindings()
    filled = [kind for kind, stored in clean.items() if stored.num_rows]
    prompted = [kind for kind in filled if "prompt" in CONTENT_FIELDS[kind]]

    def add(breaches: Iterable[RowFinding], kinds: Collection[str], *rules: str) -> None:
        asked = []
        for breach in breaches:
            severity = suites.severity(breach.kind, breach.rule)
            if severity is not None:
                asked.append(replace(breach, severity=severity))
        order = list(dict.fromkeys(breach.rule for breach in asked))
        asked.sort(key=lambda breach: (order.index(breach.rule), filled.index(breach.kind)))
        findings.breaches += asked
        for kind in kinds:
            findings.checked.setdefault(kind, []).extend(rules)

    leaked, findings.counts = prefix_leakage(rows)
    add(leaked, prompted, PREFIX_RULE, FIRST_TURN_RULE)
    severities = set()
    for kind in filled:
        severities.add(suites.severity(kind, NEAR_DUPLICATES))
        severities.add(suites.severity(kind, SIMILAR_PROMPTS))
    decides = not severities <= {"warn", None}
    most_rows = max((clean[kind].num_rows for kind in filled), default=0)
    if config.near_duplicates.searches(most_rows, decides):
        given_kinds = [kind for kind in filled if kind not in derived]
        duplicates, compared = near_duplicates(rows, given_kinds, config.near_duplicates)
        add(duplicates, given_kinds, NEAR_DUPLICATES)
        for kind, count in compared.items():
            findings.counts.setdefault(kind, {})["near_duplicates_compared"] = float(count)
        add(similar_prompts(rows, config.near_duplicates), prompted, SIMILAR_PROMPTS)
    if config.languages:
        strange, findings.languages = languages(rows, filled, config.languages)
        add(strange, filled, LANGUAGE)
    if evaluation:
        contaminated, findings.evaluation = contamination(rows, evaluation, config.near_duplicates)
        add(contaminated, filled, CONTAMINATION)
    return findings


def apply_set_rules(validated: Validated, findings: SetFindings) -> None:
    """Quarantine the rows that expectations refuse for what was found in the whole set.

    Such rows are no bad data: they are ``left_out``, and do not count towards ``max_quarantined``.
    """
    for kind, rules in findings.checked.items():
        checked = validated.kinds[kind]
        reasons: dict[str, dict[int, str]] = {rule: {} for rule in rules}
        for found in findings.breaches:
            if found.kind == kind and found.number is not None:
                reasons[found.rule].setdefault(found.number, f"{found.reason} ({found.other})")
        for rule, of_rows in reasons.items():
            checked.frame[rule] = found_column(len(checked.frame), of_rows)
        of_set = {}
        for suite_rule, verdict in validated.ask(kind, SET).items():
            if suite_rule.name in reasons:
                of_set[suite_rule] = verdict
        checked.take(of_set, reasons)

"""Validate raw rows: which are clean, which are quarantined and why, and counts.

Expectations are asked of rows as columns: texts that people can read, and numbers taken of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.collection.raw_folder import RawData, StoredRows, count_refused, read_refused
from rlhf_core.data.collection.rows import DERIVED_FROM, derive, whole_records
from rlhf_core.data.row_counts import QUARANTINE_SCHEMA, RowFinding, findings_table
from rlhf_core.data.schema import CONTENT_FIELDS, ROLES
from rlhf_core.data.tables import TableWriter, mapped_table
from rlhf_core.data.text import comparable, has_visible_text
from rlhf_core.data.validation.suites import (
    CONTRADICTED_BY,
    COPIES,
    NOT_DERIVED,
    NOT_DUPLICATE,
    PROMPT_COLUMNS,
    ROWS,
    SOURCE_PASSED,
    Checkpoints,
    SuiteRule,
    Suites,
    Verdicts,
    column_schema,
)
from rlhf_core.runtime.progress import Progress, progress


@dataclass
class CheckedKind:
    """The rows of a kind, and what the rules say of them.

    Attributes:
        raw: The rows that were checked. Texts stay in their file.
        refused: How many more readers refused.
        cut: How many more ``collect.limit`` left out.
        frame: The columns that the expectations are about; none where there is no row.
        reasons: By number of a raw row, why it is quarantined.
        left_out: Rows in the quarantine without a fault: over a limit of lengths, derived from rows
            that were refused, or found in the whole set.
        failed: Rows that each rule refused; 0 is there for rules that fail the set.
        warned: Rows that stay although they break a rule that only warns.
        must_hold: The rules that fail the set where a row, or the table, breaks them.
    """

    raw: StoredRows
    refused: int = 0
    cut: int = 0
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    left_out: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    must_hold: list[str] = field(default_factory=list)
    verdicts: Verdicts = field(default_factory=dict)

    @property
    def clean(self) -> StoredRows:
        """The rows that passed."""
        return self.raw.where(~self._is_refused)

    @property
    def _is_refused(self) -> npt.NDArray[np.bool_]:
        """By raw row, whether a rule refused it."""
        return np.isin(self.raw.numbers, list(self.reasons))

    @property
    def raw_rows(self) -> int:
        """Rows that were checked or refused by readers."""
        return self.raw.num_rows + self.refused

    @property
    def quarantined(self) -> int:
        """Rows in the quarantine."""
        return self.refused + len(self.reasons)

    @property
    def quarantined_share(self) -> float:
        """The share of bad rows among all that were read.

        A cut row counts as bad as often as a checked one. Rows that are ``left_out`` are in the
        quarantine, but do not count here.
        """
        checked = self.raw.num_rows
        read = self.raw_rows + self.cut
        if not read:
            return 0.0
        bad = float(self.refused)
        if checked:
            failed = len(self.reasons) - self.left_out
            bad += failed * (checked + self.cut) / checked
        return bad / read

    def place(self, row: int) -> str:
        """Return what messages call a row: its file and line, or its id."""
        identity = str(self.frame["id"].iat[row])
        origin = self.raw.origin(row)
        return RowFinding("", self.raw.kind, "", **origin, id=identity).where

    def passing(self, verdicts: Verdicts) -> npt.NDArray[np.bool_]:
        """Return by row whether it breaks none of the rules that do more than warn."""
        passed = np.ones(len(self.frame), dtype=bool)
        for rule, verdict in verdicts.items():
            is_broken = rule.severity != "warn" and not verdict.passed
            if is_broken and verdict.rows is not None:
                passed[verdict.rows] = False
        return passed

    def take(
        self, verdicts: Verdicts, found: Mapping[str, Mapping[int, str]] | None = None
    ) -> None:
        """Count the rows that break rules, and quarantine those that a rule refuses.

        A row that is refused does not count under rules that only warn, nor under those that hold
        by ``mostly``.

        Args:
            found: What was found by rules about the whole set, by rule and row: the reasons that
                the quarantine states.
        """
        refused: dict[int, dict[str, SuiteRule]] = {}
        warned: dict[str, set[int]] = {}
        for rule, verdict in verdicts.items():
            rows = []
            if verdict.rows is not None:
                rows = verdict.rows.tolist()
            table_broken = verdict.rows is None and not verdict.passed
            counts = self.failed
            if rule.severity == "warn":
                counts = self.warned
            if found is not None:
                counts.setdefault(rule.name, 0)
            if rule.severity == "warn":
                of_rule = warned.setdefault(rule.name, set())
                of_rule.update(rows)
                if table_broken:
                    of_rule.add(-1)
                continue
            if rule.severity == "fail" or verdict.rows is None:
                self.must_hold.append(rule.name)
                self.failed[rule.name] += table_broken
            if verdict.passed:
                warned.setdefault(rule.name, set()).update(rows)
                continue
            for row in rows:
                rules_of_row = refused.setdefault(row, {})
                rules_of_row.setdefault(rule.name, rule)
        for row, rules in sorted(refused.items()):
            self.failed.update(rules.keys())
            reasons = []
            is_fault = False
            for name, rule in rules.items():
                reason = found[name][row] if found else rule.reason
                reasons.append(reason)
                is_fault |= rule.is_fault
            self.reasons[row] = reasons
            self.left_out += found is not None or not is_fault
        for name, of_rule in warned.items():
            if count := len(of_rule - refused.keys()):
                self.warned[name] += count
        self.verdicts |= verdicts

    def quarantine(self) -> Iterator[list[RowFinding]]:
        """Yield the rows that rules refused in parts."""
        if not self.reasons:
            return
        kind = self.raw.kind
        numbers = iter(sorted(self.reasons))
        for table in self.raw.where(self._is_refused).parts():
            findings = []
            for row in table.to_pylist():
                number = next(numbers)
                first, *more = self.reasons[number]
                about = {"id": str(row["id"]), **self.raw.origin(number)}
                text = json.dumps(row, ensure_ascii=False, default=str)
                findings.append(RowFinding("", kind, first, **about, row=text, more=more))
            yield findings


@dataclass
class Validated:
    """Clean rows, the quarantine, and counts by kind.

    Attributes:
        agreement: Of the labels of pairs that occur more than once; see :func:`label_agreement`.
    """

    raw: RawData
    checkpoints: Checkpoints
    kinds: dict[str, CheckedKind] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def clean(self) -> dict[str, StoredRows]:
        """The rows that passed, by kind."""
        return {kind: checked.clean for kind, checked in self.kinds.items()}

    def ask(self, kind: str, page: str) -> Verdicts:
        """Ask the expectations of a kind whose columns are there now."""
        checked = self.kinds[kind]
        return self.checkpoints.run(kind, checked.frame, page, checked.place)

    def quarantine(self) -> Iterator[list[RowFinding]]:
        """Yield all quarantined rows in parts: those that readers refused, then those by kind."""
        yield from read_refused(self.raw.refused)
        for checked in self.kinds.values():
            yield from checked.quarantine()


def write_quarantine(path: Path, parts: Iterable[Sequence[RowFinding]]) -> None:
    """Write ``data/quarantine.parquet``: every refused row, if any, with its reasons."""
    with TableWriter(path, QUARANTINE_SCHEMA) as writer:
        for rows in parts:
            writer.write(findings_table(rows, QUARANTINE_SCHEMA))


def validate(raw: RawData, suites: Suites, folder: Path) -> Validated:
    """Check the rows of every kind by its expectations; rules about the whole set come later.

    A row that breaks any rule goes to the quarantine with all its reasons, after the rows that
    readers refused. So does a row of a derived kind of which no row that passed is the source, nor
    a record that gives nothing but a prompt. Rules that only warn are counted.

    Args:
        folder: Holds the texts of the columns while the result is used.
    """
    result = Validated(raw, Checkpoints(suites))
    refused = count_refused(raw.refused)
    derivable: dict[str, set[str]] = {kind: set() for kind in raw.derived}
    if "prompts" in derivable:
        derivable["prompts"].update(raw.prompt_only)
    total = sum(rows.num_rows for rows in raw.rows.values())
    with progress(total, "checking rows") as bar:
        for kind, rows in raw.rows.items():
            checked = CheckedKind(rows, refused[kind], raw.cut.get(kind, 0))
            result.kinds[kind] = checked
            if not rows.num_rows:
                continue
            texts = folder / f"{kind}.arrow"
            frame, hashes = read_columns(kind, _advancing(rows, bar), texts)
            if kind == "preferences":
                margins = frame["margin"].array.tolist()
                result.agreement = label_agreement(hashes, margins)
            checked.frame = frame
            verdicts = result.ask(kind, ROWS)
            copied = copies(hashes.column("content"), checked.passing(verdicts))
            ids = frame["id"].array
            copied_from = {row: f"a copy of {ids[other]}" for row, other in copied.items()}
            frame[NOT_DUPLICATE] = found_column(len(frame), copied_from)
            if kind in raw.derived:
                is_of_file = np.arange(len(frame)) < raw.of_files.get(kind, 0)
                has_source = frame["id"].isin(derivable.pop(kind)).to_numpy()
                lost = np.flatnonzero(~(is_of_file | has_source)).tolist()
                not_derived = dict.fromkeys(lost, NOT_DERIVED)
                frame[SOURCE_PASSED] = found_column(len(frame), not_derived)
            verdicts |= result.ask(kind, COPIES)
            _derive_ids(rows, checked.passing(verdicts), derivable)
            checked.take(verdicts)
    return result


def found_column(rows: int, findings: Mapping[int, str]) -> pd.Series:
    """Return a column with what a rule about the set found of each row, else null."""
    values = np.full(rows, None, dtype=object)
    values[list(findings)] = list(findings.values())
    return pd.Series(values, dtype="str")


def _advancing(rows: StoredRows, bar: Progress) -> Iterator[pa.Table]:
    for table in rows.parts():
        yield table
        bar.advance(table.num_rows)


def _derive_ids(
    rows: StoredRows, passed: npt.NDArray[np.bool_], ids: Mapping[str, set[str]]
) -> None:
    """Add the ids of the rows of each derived kind that come from rows that passed."""
    children = [kind for kind in ids if rows.kind in DERIVED_FROM[kind]]
    if not children:
        return
    start = 0
    for parents in whole_records(_with_places(rows)):
        end = start + len(parents)
        passed_here = passed[start:end].tolist()
        for kind in children:
            derive(kind, parents, ids[kind], passed_here)
        start = end


def _with_places(rows: StoredRows) -> Iterator[list[dict[str, Any]]]:
    """Yield rows in parts, those of files with their ``path`` and ``position``."""
    numbers = iter(rows.numbers)
    for table in rows.parts():
        part = table.to_pylist()
        if rows.origins is not None:
            for row in part:
                origin = rows.origin(next(numbers))
                row |= {"path": origin["source"], "position": origin["position"]}
        yield part


DIGEST_BYTES = 16
DIGEST = pa.binary(DIGEST_BYTES)


def read_columns(
    kind: str, tables: Iterable[pa.Table], file: Path
) -> tuple[pd.DataFrame, pa.Table]:
    """Return the columns of rows that arrive in parts, and hashes of each row.

    See :func:`_digests`. The texts stay in ``file``, which is mapped into memory. Rows are compared
    with each other by hashes, so that a part is not needed after it was read. ``contradicted_by``
    is the id of a pair that is labelled the other way round.
    """
    digests: list[pa.Table] = []

    def columns() -> Iterator[pa.Table]:
        for table in tables:
            part = _columns(kind, table)
            digests.append(_digests(kind, part))
            yield part

    table = mapped_table(file, column_schema(kind), columns())
    hashed = pa.concat_tables(digests)
    stays_arrow = {pa.float64(): pd.ArrowDtype(pa.float64())}
    frame = table.to_pandas(types_mapper=stays_arrow.get)
    if kind == "preferences":
        labelled = hashed.column("labelled").combine_chunks()
        swapped = hashed.column("swapped").combine_chunks()
        other = pc.index_in(swapped, value_set=labelled)
        # Of a pair with equal replies the swapped one is the pair itself.
        is_itself = pc.equal(swapped, labelled)
        other = pc.if_else(is_itself, pa.scalar(None, pa.int32()), other)
        contradicting = table.column("id").take(other)
        frame[CONTRADICTED_BY] = pd.Series(contradicting.to_pandas(), dtype="str")
    return frame, hashed


def copies(contents: pa.ChunkedArray, accepted: npt.NDArray[np.bool_]) -> dict[int, int]:
    """Return the rows that have the same texts as another one, each with the number of that row.

    The first row of its texts that is ``accepted`` is no copy: what a refused row repeats is not
    lost.
    """
    hashes = contents.combine_chunks()
    original_of: dict[int, int] = {}
    every_row = np.arange(len(hashes))
    for considered in (every_row, np.flatnonzero(accepted)):
        values = hashes.take(pa.array(considered))
        positions = pc.index_in(values, value_set=values).to_numpy()
        originals = considered[positions]
        for row, original in zip(considered.tolist(), originals.tolist(), strict=True):
            if row == original:
                original_of.pop(row, None)
            else:
                original_of[row] = original
    return original_of


def label_agreement(hashes: pa.Table, margins: Iterable[float | None]) -> dict[str, float]:
    """Count the labels of every pair among all rows that were read, refused ones too.

    White space and invisible characters do not count. Exact copies, of one margin too, are one
    label: what repeats a row is no second annotator.

    Args:
        hashes: Of the ``content`` of each row, and of its pair as it is ``labelled`` and
            ``swapped``.
        margins: Of each row.

    Returns:
        ``repeated_pairs``: pairs of replies to a prompt with two labels or more;
        ``contradicted_pairs``: those of them that are labelled both ways; ``label_agreement``: the
        share of their labels that say what most labels of the pair say, half of a tie. The last is
        not there where no pair repeats.
    """
    labels: dict[bytes, list[int]] = {}
    seen: set[int] = set()
    columns = [hashes.column(name).to_pylist() for name in ("content", "labelled", "swapped")]
    for content, labelled, swapped, margin in zip(*columns, margins, strict=True):
        copy = hash((content, margin))
        if copy not in seen and labelled != swapped:  # which are equal where the replies are
            pair = min(labelled, swapped)
            votes = labels.setdefault(pair, [0, 0])
            votes[labelled < swapped] += 1
        seen.add(copy)
    repeated = [votes for votes in labels.values() if sum(votes) > 1]
    contradicted = sum(min(votes) > 0 for votes in repeated)
    counts = {"repeated_pairs": float(len(repeated)), "contradicted_pairs": float(contradicted)}
    if repeated:
        agreeing = sum(max(votes) for votes in repeated)
        everything = sum(sum(votes) for votes in repeated)
        counts["label_agreement"] = agreeing / everything
    return counts


def _columns(kind: str, table: pa.Table) -> pa.Table:
    schema = column_schema(kind)
    columns = {}
    for name in schema.names:
        if name not in PROMPT_COLUMNS:
            columns[name] = table.column(name)
    if kind != "pretrain":
        shown = [_prompt_columns(prompt) for prompt in table.column("prompt").to_pylist()]
        for name, form in PROMPT_COLUMNS.items():
            values = [of_row[name] for of_row in shown]
            columns[name] = pa.array(values, form)
    arrays = [columns[field.name].cast(field.type) for field in schema]
    return pa.table(arrays, schema)


def _prompt_columns(
    prompt: Sequence[Mapping[str, str | None]] | None,
) -> dict[str, str | int | None]:
    """Return a prompt as people read it, and numbers taken of it.

    One that is missing has no turns.
    """
    turns = []
    for turn in prompt or ():
        if turn:
            role = turn["role"] or ""
            content = turn["content"] or ""
            turns.append((role, content))
    roles = []
    shown = []
    blank_turns = prompt_chars = 0
    last_turn = ""
    for role, content in turns:
        known_role = role if role in ROLES else f"<{role}>"
        roles.append(known_role)
        shown.append(f"{role}: {content}")
        prompt_chars += len(content)
        if role != "system" and not has_visible_text(content):
            blank_turns += 1
        last_turn = content
    if not turns:
        blank_turns = 1
    return {
        "prompt": None if prompt is None else "\n\n".join(shown),
        "roles": " ".join(roles),
        "turns": len(turns),
        "prompt_chars": prompt_chars,
        "blank_turns": blank_turns,
        "last_turn": last_turn,
    }


def _digests(kind: str, columns: pa.Table) -> pa.Table:
    """Return 128-bit hashes of the content of rows.

    Pairs have two more, as they are labelled and the other way round. For the label, texts that
    differ in white space or invisible characters alone count as equal. Two of a billion contents
    have the same hash with a probability of about 1e-21.
    """
    texts = []
    for name in CONTENT_FIELDS[kind]:
        column = pc.fill_null(columns.column(name), "")
        texts.append(column.to_pylist())
    contents = list(zip(*texts, strict=True))
    hashes = {"content": [_digest(map(str.encode, content)) for content in contents]}
    if kind == "preferences":
        labelled = []
        swapped = []
        for content in contents:
            prompt, chosen, rejected = (_digest([comparable(text).encode()]) for text in content)
            labelled.append(_digest((prompt, chosen, rejected)))
            swapped.append(_digest((prompt, rejected, chosen)))
        hashes |= {"labelled": labelled, "swapped": swapped}
    return pa.table({name: pa.array(values, DIGEST) for name, values in hashes.items()})


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()

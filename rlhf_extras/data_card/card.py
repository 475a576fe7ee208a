"""The data card: what stages collect and validate know of the data, in sections.

It is the data report ``card`` of ``rlhf.data_reports``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from rlhf_core.config.data import AUTOMATIC_ROWS, RULES, NearDuplicatesConfig, ValidateConfig
from rlhf_core.data.collection.rows import texts_of_turns
from rlhf_core.data.row_counts import ReasonCounts, RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.statistics import PERCENTILES, SEQUENCE, TokenCounts, percentiles
from rlhf_core.data.text import excerpt, shortened
from rlhf_core.data.validation.data_reports import CheckedData
from rlhf_core.data.validation.suites import NOT_DERIVED, SOURCE_PASSED, Suites
from rlhf_core.data.validation.tables import Validated
from rlhf_extras.data_card.pages import (
    CardSection,
    CardTable,
    DataCard,
    Histogram,
    markdown,
    page,
    safe_card,
)


def balance(counts: Mapping[str, int]) -> float | None:
    """Return Pielou's evenness, 1 where all are equally frequent; None for fewer than two.

    It is the entropy over its maximum.
    """
    if len(counts) < 2:
        return None
    frequencies = list(counts.values())
    entropy = float(stats.entropy(frequencies))
    return entropy / math.log(len(counts))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends with an s: "1 pair", "2 pairs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


TITLE = "Data card"


def write_card(folder: Path, data: CheckedData, config: ValidateConfig) -> None:
    """Write ``card.html``, ``card.md`` and ``release.md``, which quotes no texts of the data."""
    card = safe_card(build_card(data, config))
    texts = {
        "card.html": page(card, TITLE),
        "card.md": markdown(card, TITLE, quotes=True),
        "release.md": markdown(card, TITLE, quotes=False),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


Lengths = Mapping[str, Mapping[str, npt.ArrayLike]]


def length_section(
    characters: Lengths,
    tokens: Mapping[str, TokenCounts] | None = None,
    tokenizer: str | None = None,
) -> CardSection:
    """Return the section on the lengths of every text column, in characters and tokens."""
    notes = [
        "Clean rows. The turns of a prompt count together; each bar holds the lengths up to the number below it."
    ]
    units: dict[str, Lengths] = {"characters": characters}
    if tokens is None:
        notes.append(
            "Lengths are in characters only: validate.tokenizer names no tokenizer. One that is made from nothing "
            "(base.source: scratch) is trained later, on the clean rows."
        )
    else:
        units["tokens"] = {kind: of_kind.lengths for kind, of_kind in tokens.items()}
        notes += _token_notes(tokens, tokenizer)
    tables, histograms = [], []
    shares = [f"{share} %" for share in PERCENTILES]
    shares[-1] = "longest"
    for unit, lengths in units.items():
        rows: list[tuple[str | float | int | None, ...]] = []
        for kind, of_kind in lengths.items():
            for name, values in of_kind.items():
                title = f"{kind}: {name}"
                rows.append((title, *percentiles(values)))
                histograms.append(Histogram.of(f"{title} ({unit})", np.asarray(values)))
        tables.append(CardTable((unit, *shares), rows))
    return CardSection("Lengths", notes, tables, histograms)


def _token_notes(tokens: Mapping[str, TokenCounts], tokenizer: str | None) -> Iterator[str]:
    """Yield how tokens were counted, of how many rows, and what the tokenizer cannot write."""
    yield (
        f"Tokens are those of the tokenizer {tokenizer}, as training writes the rows: a prompt in the chat "
        f"template, a reply with the token that ends it. {SEQUENCE} is a prompt with its longest reply."
    )
    for kind, tally in tokens.items():
        if tally.looked_at < tally.rows:
            yield f"{kind}: tokens of {tally.looked_at} of {tally.rows} rows were counted, spread evenly."
        for count in ReasonCounts.of(tally.unwritable).commonest():
            where = ""
            if count.first.source is not None:
                where = f" (first: {count.first.where})"
            rows_have = "rows have" if count.rows > 1 else "row has"
            yield f"{kind}: {count.rows} {rows_have} no tokens, since {count.reason}{where}."


EXAMPLES_OF_A_RULE = 3
# A finding, how its row begins, what it resembles, and how that begins, which is empty if that is no
# row of the data.
Example = tuple[RowFinding, str, str, str]


def examples_of(findings: Sequence[RowFinding], validated: Validated) -> list[Example]:
    """Return the first findings of each rule with the places and texts of both rows."""
    listed: Counter[str] = Counter()
    chosen = []
    for finding in findings:
        if listed[finding.rule] < EXAMPLES_OF_A_RULE:
            chosen.append(finding)
        listed[finding.rule] += 1
    ids: set[str] = set()
    for finding in chosen:
        ids |= {finding.id, finding.other}
    rows = _texts_of(ids, validated)
    examples = []
    for finding in chosen:
        _, text = rows.get(finding.id, ("", ""))
        other, other_text = rows.get(finding.other, (finding.other, ""))
        examples.append((finding, text, other, other_text))
    return examples


def _texts_of(ids: Collection[str], validated: Validated) -> dict[str, tuple[str, str]]:
    """Return the place and the beginning of every row with one of these ids.

    Of copies the first counts.
    """
    rows: dict[str, tuple[str, str]] = {}
    if not ids:
        return rows
    for kind, checked in validated.kinds.items():
        if not checked.raw.num_rows:
            continue
        is_chosen = checked.frame["id"].isin(ids)
        chosen = checked.raw.where(is_chosen.to_numpy(bool))
        if not chosen.num_rows:
            continue
        content = CONTENT_FIELDS[kind]
        numbers = iter(chosen.numbers.tolist())
        for part in chosen.parts(["id", *content]):
            for row in part.to_pylist():
                origin = chosen.origin(next(numbers))
                place = RowFinding("", kind, "", **origin, id=row["id"]).where
                texts = texts_of_turns(row.get("prompt") or ())
                texts += [row[name] for name in content if name != "prompt"]
                beginning = excerpt("\n".join(texts))
                rows.setdefault(row["id"], (place, beginning))
    return rows


EXAMPLES = 10


def refused_section(quarantined: Iterable[RowFinding]) -> CardSection:
    """Return ten refused rows of the sources, as many different reasons as possible first."""
    examples, total = spread_over_reasons(quarantined, EXAMPLES)
    rows = []
    for row in examples:
        rows.append((row.kind, row.where, "; ".join(row.reasons), row.row))
    note = (
        f"Rows in the quarantine: {total}. All are in data/quarantine.parquet, with every reason."
    )
    tables = [CardTable(("kind", "row", "reasons", "content"), rows)] if rows else []
    return CardSection("Refused rows", [note], tables, quotes_rows=True)


def spread_over_reasons(
    quarantined: Iterable[RowFinding], count: int
) -> tuple[list[RowFinding], int]:
    """Choose ``count`` rows: the first of each kind and reason, then the second, and so on.

    A row of a file is chosen once, not again as a row of a kind that is derived from it.

    Returns:
        The rows, with the beginnings of their contents alone, and how many rows there are in all.
    """
    total = 0
    groups: dict[tuple[str, str], list[RowFinding]] = {}
    origins: set[str] = set()
    for row in quarantined:
        total += 1
        if NOT_DERIVED in row.reasons or row.where in origins:
            continue
        group = groups.setdefault((row.kind, row.reason), [])
        if len(group) < count:
            group.append(replace(row, row=excerpt(row.row)))
            origins.add(row.where)
    chosen: list[RowFinding] = []
    for rank in range(count):
        chosen += [group[rank] for group in groups.values() if rank < len(group)]
    return chosen[:count], total


CATEGORIES = 12
LONGEST_CATEGORY = 60
FILE_COUNTS = ("records", "expanded", "rows", "refused")
ROW_METRICS = (
    *("raw", "quarantined", "left_out", "cut", "clean", "groups", "train", "validation", "test"),
    *("referee_train", "referee_validation", "judge_train", "judge_validation"),
)
LEAKS = ("test", "test_prefix_leaks", "test_first_turn_leaks")
NOT_STATED = "not stated"


def build_card(sources: CheckedData, config: ValidateConfig) -> DataCard:
    """Return the card; its text depends on the data and the parameters alone."""
    verdict = "The data passed its gate"
    if sources.failed:
        verdict = f"The data gate failed: {', '.join(sources.failed)}"
    examples = examples_of(sources.set_findings.breaches, sources.validated)
    kinds = []
    for kind in sources.validated.kinds:
        if isinstance(sources.metrics.get(kind), Mapping):
            kinds.append(kind)
    lengths = {kind: of_kind.all_lengths() for kind, of_kind in sources.statistics.items()}
    suites = sources.validated.checkpoints.suites
    sections = [
        source_section(sources.manifest),
        _rows(sources.metrics, kinds),
        length_section(lengths, sources.tokens, config.tokenizer),
        _balance(sources),
        rules_section(sources.metrics, kinds, suites),
        _leakage(sources, examples, config.near_duplicates),
    ]
    quoted = []
    for found, text, other, other_text in examples:
        if other_text:
            quoted.append((found.where, text, other, other_text))
    if quoted:
        similar = CardTable(("row", "begins", "similar to", "begins"), quoted)
        note = "The beginnings of the examples above."
        sections.append(CardSection("Similar rows", [note], [similar], quotes_rows=True))
    refused = chain.from_iterable(sources.validated.quarantine())
    sections.append(refused_section(refused))
    return DataCard(not sources.failed, verdict, sections)


def source_section(manifest: Mapping[str, Any]) -> CardSection:
    """Return where the rows of each kind come from, file by file."""
    rows: list[tuple[Any, ...]] = []
    dropped: Counter[tuple[str, str]] = Counter()
    for kind, about in manifest.get("kinds", {}).items():
        for file in about.get("files", []):
            of_file = file.get("dropped", {})
            for reason, count in of_file.items():
                dropped[kind, reason] += count
            licence = file.get("licence") or NOT_STATED
            about_file = (kind, file["source"], file["format"], licence)
            counts = [file.get(name) for name in FILE_COUNTS]
            counts.append(sum(of_file.values()))
            rows.append((*about_file, *counts, file.get("cut"), file.get("share")))
        if about.get("derived_from"):
            source = f"derived from {about['derived_from']}"
            derived = about.get("derived_rows", about.get("rows"))
            about_file = (kind, source, "", "")
            counts = [None, None, derived, None, None]
            rows.append((*about_file, *counts, about.get("cut"), None))
    notes = []
    for (kind, reason), count in dropped.items():
        notes.append(f"{kind}: {counted(count, 'record')} dropped, since {reason}.")
    if manifest.get("source") == "world":
        notes.append(
            "The synthetic world, generated by this software. It has no licence of its own."
        )
    header = ("kind", "source", "format", "licence", *FILE_COUNTS, "dropped", "cut", "share")
    return CardSection("Sources", notes, [CardTable(header, rows)] if rows else [])


def _rows(metrics: Mapping[str, Any], kinds: Sequence[str]) -> CardSection:
    rows = []
    for name in ROW_METRICS:
        counts = [_count(metrics[kind], name) for kind in kinds]
        if any(count is not None for count in counts):
            rows.append((name.replace("_", " "), *counts))
    note = "Train and validation pairs are the reward model's; the referee's and the judge's are listed apart."
    return CardSection("Rows", [note], [CardTable(("", *kinds), rows)])


def _balance(sources: CheckedData) -> CardSection:
    pairs = sources.metrics.get("preferences", {})
    notes = []
    tables = []
    if "longer_preferred_share" in pairs:
        share = pairs["longer_preferred_share"]
        low = pairs["longer_preferred_low95"]
        high = pairs["longer_preferred_high95"]
        notes.append(
            f"The longer reply is preferred in {share:.1%} of the pairs whose replies differ in length "
            f"(95 %: {low:.1%} to {high:.1%})."
        )
    if pairs.get("repeated_pairs"):
        repeated = int(pairs["repeated_pairs"])
        contradicted = int(pairs["contradicted_pairs"])
        have = "has" if repeated == 1 else "have"
        are = "is" if contradicted == 1 else "are"
        notes.append(
            f"{counted(repeated, 'pair')} {have} more than one label; {pairs['label_agreement']:.1%} of these "
            f"labels say what most do, and {counted(contradicted, 'pair')} {are} labelled both ways."
        )
    elif "repeated_pairs" in pairs:
        notes.append("No pair has more than one label, so the agreement of annotators is unknown.")
    # Kinds that are derived have the categories and languages of what they come from.
    derived = set()
    for kind, about in sources.manifest.get("kinds", {}).items():
        if about.get("derived_from") and "derived_rows" not in about:
            derived.add(kind)
    for kind, of_kind in sources.statistics.items():
        counts = of_kind.categories
        if len(counts) > 1 and kind not in derived:
            evenness = balance(counts) or 0.0
            commonest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            rows = []
            for name, count in commonest[:CATEGORIES]:
                rows.append((shortened(name, LONGEST_CATEGORY), count, count / of_kind.rows))
            tables.append(CardTable((f"category of {kind}", "rows", "share"), rows))
            notes.append(
                f"{kind}: {len(counts)} categories, evenness {evenness:.2f} (1: all equally frequent)."
            )
    for kind, languages in sources.set_findings.languages.items():
        if kind in derived:
            continue
        total = languages.total()
        rows = []
        for name, count in languages.most_common(CATEGORIES):
            rows.append((name, count, count / total))
        tables.append(CardTable((f"language of {kind}", "rows", "share"), rows))
    return CardSection("Balance", notes, tables)


def rules_section(metrics: Mapping[str, Any], kinds: Sequence[str], suites: Suites) -> CardSection:
    """Return how many rows of each kind break each rule, those of the project's suites first."""
    others = set()
    for kind in kinds:
        for name in metrics[kind]:
            if name.startswith(("failed_", "warned_")):
                others.add(name.partition("_")[2])
    rows = []
    for rule in (*RULES, *sorted(others - {*RULES})):
        counts = [_count(metrics[kind], f"failed_{rule}", f"warned_{rule}") for kind in kinds]
        if any(count is not None for count in counts):
            of_kinds = [suites.severity(kind, rule) for kind in kinds]
            severities = dict.fromkeys(filter(None, of_kinds))
            rows.append((rule, ", ".join(severities), *counts))
    notes = [
        "Rows that break each rule. Refused rows are in the quarantine, rows that were warned about are not. "
        f"A derived row breaks {SOURCE_PASSED} if every row that it comes from was refused."
    ]
    tables = [CardTable(("rule", "severity", *kinds), rows)] if rows else []
    return CardSection("Rules", notes, tables)


def _leakage(
    sources: CheckedData, examples: Sequence[Example], config: NearDuplicatesConfig
) -> CardSection:
    found = sources.set_findings
    notes = []
    rows = []
    for kind, numbers in sources.metrics.items():
        if isinstance(numbers, Mapping) and "test_prefix_leaks" in numbers:
            counts = [_count(numbers, name) for name in LEAKS]
            rows.append((kind, *counts))
    header = (
        "kind",
        "test rows",
        "begin like a training prompt, or the reverse",
        "share their first turn with one",
    )
    tables = [CardTable(header, rows)]
    if not any("near_duplicates_compared" in numbers for numbers in found.counts.values()):
        why = "validate.near_duplicates.search"
        if config.search == "auto":
            why += f", which is auto: only sets of at most {AUTOMATIC_ROWS} rows of a kind are searched"
        notes.append(f"Near duplicates were not searched for ({why}).")
    if found.evaluation:
        files = []
        for file in found.evaluation:
            met = len(file.met)
            share = met / max(file.prompts, 1)
            files.append((file.source, file.prompts, file.refused, met, share))
        columns = ("evaluation file", "prompts", "unreadable", "met in training", "share")
        tables.append(CardTable(columns, files))
    else:
        notes.append("No evaluation files were given (validate.evaluation_files).")
    if examples:
        notes.append("Examples are below; data/card/findings.parquet has all findings.")
        listed = []
        for leaked, _, other, _ in examples:
            place = (leaked.rule, leaked.kind, leaked.where)
            listed.append((*place, leaked.reason, other, leaked.similarity))
        of_finding = ("rule", "kind", "row", "finding", "other", "similarity")
        tables.append(CardTable(of_finding, listed))
    return CardSection("Leakage and near duplicates", notes, tables)


def _count(numbers: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these counts that there is, as a whole number."""
    for name in names:
        if name in numbers:
            return int(numbers[name])
    return None

"""The data card: put together from what stages collect and validate know; as Markdown, as one page,
and as a folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from rlhf_core.config.data import AUTOMATIC_ROWS, RULES, NearDuplicatesConfig, ValidateConfig
from rlhf_core.data.dataset import KindStatistics, balance
from rlhf_core.data.inspection.report_lines import counted
from rlhf_core.data.row_counts import FINDINGS_SCHEMA, ReasonCounts, RowFinding, findings_table
from rlhf_core.data.schema import CONTENT_FIELDS, write_table
from rlhf_core.data.statistics import PERCENTILES, SEQUENCE, TokenCounts, percentiles
from rlhf_core.data.text import excerpt, safe_text, shortened
from rlhf_core.data.validation.set_rules import SetFindings
from rlhf_core.data.validation.suites import NOT_DERIVED, SOURCE_PASSED, Suites
from rlhf_core.data.validation.tables import Validated
from rlhf_core.evaluation.figures import bar_chart, format_number
from rlhf_core.storage.files import atomic_dir


@dataclass(frozen=True)
class Histogram:
    """How many lengths lie in (2^(i-1), 2^i] for every i from the first to the last that is
    needed.
    """

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, lengths: npt.NDArray[np.int64]) -> Histogram:
        """Count ``lengths``, of which there must be one at least; an empty text counts as one
        character.
        """
        exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        first, counts = int(exponents.min()), np.bincount(exponents - exponents.min())
        return cls(
            title, tuple(2 ** (first + i) for i in range(len(counts))), tuple(counts.tolist())
        )


@dataclass(frozen=True)
class CardTable:
    """A table; cells are text, numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | float | int | None, ...]]

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds no text and is aligned to the right, with its heading."""
        columns = range(len(self.header))
        return [
            bool(self.rows) and not any(isinstance(row[column], str) for row in self.rows)
            for column in columns
        ]


@dataclass(frozen=True)
class CardSection:
    """A heading with what follows it. ``quotes_rows`` says that texts of the data are quoted in
    it.
    """

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[CardTable] = ()
    histograms: Sequence[Histogram] = ()
    quotes_rows: bool = False


@dataclass(frozen=True)
class DataCard:
    """The whole card: ``verdict`` is that of the data gate."""

    passed: bool
    verdict: str
    sections: list[CardSection] = field(default_factory=list)


LONGEST_CELL = 400
BARS = "▁▂▃▄▅▆▇█"
# Characters with a meaning in Markdown or HTML, as they are written to mean themselves.
ESCAPED = str.maketrans(
    {
        "\\": "\\\\",
        "|": "\\|",
        "<": "&lt;",
        ">": "&gt;",
        "&": "&amp;",
        "*": "\\*",
        "`": "\\`",
        "[": "\\[",
    }
)


def markdown(card: DataCard, title: str, quotes: bool) -> str:
    """Return the card; ``quotes`` includes the sections that quote texts of the data."""
    blocks = [f"# {title}", f"{_text(card.verdict)}."]
    for section in card.sections:
        if quotes or not section.quotes_rows:
            blocks += _section(section)
    return "\n\n".join(blocks) + "\n"


def _section(section: CardSection) -> Iterator[str]:
    yield f"## {section.title}"
    if section.notes:
        yield "\n".join(f"- {_text(note)}" for note in section.notes)
    yield from (_table(table) for table in section.tables)
    if section.histograms:
        rows = [
            (histogram.title, f"{histogram.edges[0]} to {histogram.edges[-1]}", _bars(histogram))
            for histogram in section.histograms
        ]
        yield _table(CardTable(("histogram", "bins, in powers of two", ""), rows))


def _table(table: CardTable) -> str:
    rule = "".join("---:|" if numeric else "---|" for numeric in table.numeric)
    lines = [_line([_text(cell) for cell in table.header]), f"|{rule}"]
    for row in table.rows:
        lines.append(_line([_text(_shown(cell)) for cell in row]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bars(histogram: Histogram) -> str:
    most = max(histogram.counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in histogram.counts)


def _text(text: str) -> str:
    return " ".join(text.split()).translate(ESCAPED)


def safe_card(part: Any) -> Any:
    """Return the card, or a part of it, with every text of it safe to print and pass on."""
    if isinstance(part, str):
        return safe_text(part)
    if isinstance(part, list | tuple):
        return type(part)(map(safe_card, part))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{name: safe_card(value) for name, value in vars(part).items()})
    return part


def _shown(cell: str | float | int | None) -> str:
    return shortened(format_number(cell), LONGEST_CELL)


SHORT_TEXT, LONGEST_WORD = 40, 28


def page(card: DataCard, title: str) -> str:
    """Return the page; every text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _shown
    environment.filters["bars"] = _bar_chart
    environment.filters["breakable"] = breakable
    environment.tests["long"] = is_long
    template = Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(card=card, title=title)


def is_long(cell: str | float | int | None) -> bool:
    """Whether a cell holds a text that may fill lines, or a path or word that must break to fit a
    narrow screen.
    """
    return isinstance(cell, str) and (
        len(cell) > SHORT_TEXT or max(map(len, cell.split()), default=0) > LONGEST_WORD
    )


def breakable(text: str) -> Markup:
    """Return a text, escaped, with places to break a line at after the folders of a path and the
    parts of a name.
    """
    parts = re.split(r"(?<=[/_])", shortened(text, LONGEST_CELL))
    return Markup("<wbr>").join(map(escape, parts))


def _bar_chart(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)


TITLE = "Data card"
FINDINGS_FILE = "findings.parquet"


def write_card(folder: Path, card: DataCard, findings: Sequence[RowFinding]) -> None:
    """Write ``card.html``, ``card.md``, ``release.md`` (without texts of the data) and
    ``findings.parquet``.
    """
    card = safe_card(card)
    with atomic_dir(folder) as target:
        (target / "card.html").write_text(page(card, TITLE), encoding="utf-8")
        (target / "card.md").write_text(markdown(card, TITLE, quotes=True), encoding="utf-8")
        (target / "release.md").write_text(markdown(card, TITLE, quotes=False), encoding="utf-8")
        write_table(target / FINDINGS_FILE, findings_table(findings, FINDINGS_SCHEMA))


Lengths = Mapping[str, Mapping[str, npt.ArrayLike]]


def length_section(
    characters: Lengths,
    tokens: Mapping[str, TokenCounts] | None = None,
    tokenizer: str | None = None,
) -> CardSection:
    """Return the section on the lengths of every text column of every kind, in characters and, if
    counted, tokens.
    """
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
    for unit, lengths in units.items():
        columns = {
            f"{kind}: {name}": values
            for kind, of_kind in lengths.items()
            for name, values in of_kind.items()
        }
        header = (unit, *(f"{share} %" if share < 100 else "longest" for share in PERCENTILES))
        tables.append(
            CardTable(header, [(title, *percentiles(values)) for title, values in columns.items()])
        )
        histograms += [
            Histogram.of(f"{title} ({unit})", np.asarray(values))
            for title, values in columns.items()
        ]
    return CardSection("Lengths", notes, tables, histograms)


def _token_notes(tokens: Mapping[str, TokenCounts], tokenizer: str | None) -> Iterator[str]:
    """Yield how tokens were counted, of how many rows, and which rows the tokenizer cannot
    write.
    """
    yield (
        f"Tokens are those of the tokenizer {tokenizer}, as training writes the rows: a prompt in the chat "
        f"template, a reply with the token that ends it. {SEQUENCE} is a prompt with its longest reply."
    )
    for kind, tally in tokens.items():
        if tally.looked_at < tally.rows:
            yield f"{kind}: tokens of {tally.looked_at} of {tally.rows} rows were counted, spread evenly."
        for count in ReasonCounts.of(tally.unwritable).commonest():
            where = "" if count.first.source is None else f" (first: {count.first.where})"
            rows_have = "rows have" if count.rows > 1 else "row has"
            yield f"{kind}: {count.rows} {rows_have} no tokens, since {count.reason}{where}."


EXAMPLES_OF_A_RULE = 3
# A finding, how its row begins, what it resembles, and how that begins (empty if that is not a row
# of the data).
Example = tuple[RowFinding, str, str, str]


def examples_of(findings: Sequence[RowFinding], validated: Validated) -> list[Example]:
    """Return the first findings of each rule with the places and texts of both rows."""
    listed: Counter[str] = Counter()
    chosen = []
    for finding in findings:
        if listed[finding.rule] < EXAMPLES_OF_A_RULE:
            chosen.append(finding)
        listed[finding.rule] += 1
    rows = _texts_of(
        {row_id for finding in chosen for row_id in (finding.id, finding.other)}, validated
    )
    return [
        (found, rows.get(found.id, ("", ""))[1], *rows.get(found.other, (found.other, "")))
        for found in chosen
    ]


def _texts_of(ids: Collection[str], validated: Validated) -> dict[str, tuple[str, str]]:
    """Return the place and the beginning of every row with one of these ids; of copies the
    first.
    """
    rows: dict[str, tuple[str, str]] = {}
    for kind, checked in validated.kinds.items() if ids else ():
        if not checked.raw.num_rows:
            continue
        chosen = checked.raw.where(checked.frame["id"].isin(ids).to_numpy(bool))
        numbers = iter(chosen.numbers.tolist())
        for part in chosen.parts(["id", *CONTENT_FIELDS[kind]]) if chosen.num_rows else ():
            for row in part.to_pylist():
                texts = [
                    turn["content"] for turn in row.get("prompt") or () if turn["role"] != "system"
                ]
                texts += [row[name] for name in CONTENT_FIELDS[kind] if name != "prompt"]
                origin = RowFinding(
                    "", kind, "", **chosen.origin(next(numbers)), id=row["id"]
                ).where
                rows.setdefault(row["id"], (origin, excerpt("\n".join(texts))))
    return rows


EXAMPLES = 10


def refused_section(quarantined: Iterable[RowFinding]) -> CardSection:
    """Return ten refused rows of the sources, as many different reasons as possible first."""
    examples, total = spread_over_reasons(quarantined, EXAMPLES)
    rows = [(row.kind, row.where, "; ".join(row.reasons), row.row) for row in examples]
    note = (
        f"Rows in the quarantine: {total}. All are in data/quarantine.parquet, with every reason."
    )
    tables = [CardTable(("kind", "row", "reasons", "content"), rows)] if rows else []
    return CardSection("Refused rows", [note], tables, quotes_rows=True)


def spread_over_reasons(
    quarantined: Iterable[RowFinding], count: int
) -> tuple[list[RowFinding], int]:
    """Choose the first row of each kind and reason, then the second of each, and so on, until there
    are ``count``.

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
    chosen = (
        group[rank] for rank in range(count) for group in groups.values() if rank < len(group)
    )
    return list(islice(chosen, count)), total


CATEGORIES = 12
LONGEST_CATEGORY = 60
FILE_COUNTS = ("records", "expanded", "rows", "refused")
ROW_METRICS = (
    *("raw", "quarantined", "left_out", "cut", "clean", "groups", "train", "validation", "test"),
    *("referee_train", "referee_validation", "judge_train", "judge_validation"),
)
NOT_STATED = "not stated"


@dataclass(frozen=True)
class CardSources:
    """What the card is made of: the manifest of the raw data, the result of validation, and
    ``metrics/data.json``.

    ``statistics`` are those of the clean rows by kind, ``failed`` the metrics of the data gate's
    conditions that failed; ``tokens`` is None without a tokenizer.
    """

    manifest: Mapping[str, Any]
    validated: Validated
    set_findings: SetFindings
    metrics: Mapping[str, Any]
    statistics: Mapping[str, KindStatistics]
    failed: Sequence[str]
    tokens: Mapping[str, TokenCounts] | None = None


def build_card(sources: CardSources, config: ValidateConfig) -> DataCard:
    """Return the card; its text depends on the data and the parameters alone."""
    examples = examples_of(sources.set_findings.breaches, sources.validated)
    quoted = [
        (found.where, text, other, other_text)
        for found, text, other, other_text in examples
        if other_text
    ]
    similar = CardTable(("row", "begins", "similar to", "begins"), quoted)
    quotes = CardSection(
        "Similar rows", ["The beginnings of the examples above."], [similar], quotes_rows=True
    )
    kinds = [
        kind for kind in sources.validated.kinds if isinstance(sources.metrics.get(kind), Mapping)
    ]
    verdict = (
        f"The data gate failed: {', '.join(sources.failed)}"
        if sources.failed
        else "The data passed its gate"
    )
    sections = [
        source_section(sources.manifest),
        _rows(sources.metrics, kinds),
        length_section(
            {kind: of_kind.all_lengths() for kind, of_kind in sources.statistics.items()},
            sources.tokens,
            config.tokenizer,
        ),
        _balance(sources),
        rules_section(sources.metrics, kinds, sources.validated.checkpoints.suites),
        _leakage(sources, examples, config.near_duplicates),
        *([quotes] if quoted else ()),
        refused_section(row for rows in sources.validated.quarantine() for row in rows),
    ]
    return DataCard(not sources.failed, verdict, sections)


def source_section(manifest: Mapping[str, Any]) -> CardSection:
    """Return where the rows of each kind come from, file by file."""
    rows: list[tuple[Any, ...]] = []
    dropped: Counter[tuple[str, str]] = Counter()
    for kind, about in manifest.get("kinds", {}).items():
        for file in about.get("files", []):
            dropped.update(
                {(kind, reason): count for reason, count in file.get("dropped", {}).items()}
            )
            numbers = [
                *(file.get(name) for name in FILE_COUNTS),
                sum(file.get("dropped", {}).values()),
            ]
            licence = file.get("licence") or NOT_STATED
            rows.append(
                (
                    kind,
                    file["source"],
                    file["format"],
                    licence,
                    *numbers,
                    file.get("cut"),
                    file.get("share"),
                )
            )
        if about.get("derived_from"):
            source = f"derived from {about['derived_from']}"
            derived = about.get("derived_rows", about.get("rows"))
            rows.append(
                (kind, source, "", "", None, None, derived, None, None, about.get("cut"), None)
            )
    notes = [
        f"{kind}: {counted(count, 'record')} dropped, since {reason}."
        for (kind, reason), count in dropped.items()
    ]
    if manifest.get("source") == "world":
        notes.append(
            "The synthetic world, generated by this software. It has no licence of its own."
        )
    header = ("kind", "source", "format", "licence", *FILE_COUNTS, "dropped", "cut", "share")
    return CardSection("Sources", notes, [CardTable(header, rows)] if rows else [])


def _rows(metrics: Mapping[str, Any], kinds: Sequence[str]) -> CardSection:
    rows = []
    for name in ROW_METRICS:
        if any(name in metrics[kind] for kind in kinds):
            rows.append((name.replace("_", " "), *(_count(metrics[kind], name) for kind in kinds)))
    note = "Train and validation pairs are the reward model's; the referee's and the judge's are listed apart."
    return CardSection("Rows", [note], [CardTable(("", *kinds), rows)])


def _balance(sources: CardSources) -> CardSection:
    pairs, notes, tables = sources.metrics.get("preferences", {}), [], []
    if "longer_preferred_share" in pairs:
        share, low, high = (
            pairs[f"longer_preferred_{name}"] for name in ("share", "low95", "high95")
        )
        notes.append(
            f"The longer reply is preferred in {share:.1%} of the pairs whose replies differ in length "
            f"(95 %: {low:.1%} to {high:.1%})."
        )
    if pairs.get("repeated_pairs"):
        repeated, contradicted = int(pairs["repeated_pairs"]), int(pairs["contradicted_pairs"])
        notes.append(
            f"{counted(repeated, 'pair')} {'has' if repeated == 1 else 'have'} more than one label; "
            f"{pairs['label_agreement']:.1%} of these labels say what most do, and {counted(contradicted, 'pair')} "
            f"{'is' if contradicted == 1 else 'are'} labelled both ways."
        )
    elif "repeated_pairs" in pairs:
        notes.append("No pair has more than one label, so the agreement of annotators is unknown.")
    # Kinds that are derived have the categories and languages of what they come from.
    kinds = sources.manifest.get("kinds", {}).items()
    derived = {
        kind for kind, about in kinds if about.get("derived_from") and "derived_rows" not in about
    }
    for kind, of_kind in sources.statistics.items():
        counts = of_kind.categories
        if len(counts) > 1 and kind not in derived:
            evenness = balance(counts) or 0.0
            commonest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:CATEGORIES]
            rows = [
                (shortened(name, LONGEST_CATEGORY), count, count / of_kind.rows)
                for name, count in commonest
            ]
            tables.append(CardTable((f"category of {kind}", "rows", "share"), rows))
            notes.append(
                f"{kind}: {len(counts)} categories, evenness {evenness:.2f} (1: all equally frequent)."
            )
    for kind, languages in sources.set_findings.languages.items():
        if kind in derived:
            continue
        total = languages.total()
        rows = [(name, count, count / total) for name, count in languages.most_common(CATEGORIES)]
        tables.append(CardTable((f"language of {kind}", "rows", "share"), rows))
    return CardSection("Balance", notes, tables)


def rules_section(metrics: Mapping[str, Any], kinds: Sequence[str], suites: Suites) -> CardSection:
    """Return how many rows of each kind break each rule, those of the project's suites first."""
    rows = []
    counted_rules = (
        name for kind in kinds for name in metrics[kind] if name.startswith(("failed_", "warned_"))
    )
    others = sorted({name.partition("_")[2] for name in counted_rules} - {*RULES})
    for rule in (*RULES, *others):
        counts = [_count(metrics[kind], f"failed_{rule}", f"warned_{rule}") for kind in kinds]
        if any(count is not None for count in counts):
            severities = dict.fromkeys(
                filter(None, (suites.severity(kind, rule) for kind in kinds))
            )
            rows.append((rule, ", ".join(severities), *counts))
    notes = [
        "Rows that break each rule. Refused rows are in the quarantine, rows that were warned about are not. "
        f"A derived row breaks {SOURCE_PASSED} if every row that it comes from was refused."
    ]
    return CardSection(
        "Rules", notes, [CardTable(("rule", "severity", *kinds), rows)] if rows else []
    )


def _leakage(
    sources: CardSources, examples: Sequence[Example], config: NearDuplicatesConfig
) -> CardSection:
    found, notes = sources.set_findings, []
    rows = []
    for kind, numbers in sources.metrics.items():
        if isinstance(numbers, Mapping) and "test_prefix_leaks" in numbers:
            counts = (
                _count(numbers, name)
                for name in ("test", "test_prefix_leaks", "test_first_turn_leaks")
            )
            rows.append((kind, *counts))
    header = (
        "kind",
        "test rows",
        "begin like a training prompt, or the reverse",
        "share their first turn with one",
    )
    tables = [CardTable(header, rows)]
    if not any("near_duplicates_compared" in numbers for numbers in found.counts.values()):
        automatic = f", which is {config.search}: only sets of at most {AUTOMATIC_ROWS} rows of a kind are searched"
        notes.append(
            "Near duplicates were not searched for (validate.near_duplicates.search"
            f"{automatic if config.search == 'auto' else ''})."
        )
    if found.evaluation:
        files = [
            (
                file.source,
                file.prompts,
                file.refused,
                len(file.met),
                len(file.met) / max(file.prompts, 1),
            )
            for file in found.evaluation
        ]
        tables.append(
            CardTable(
                ("evaluation file", "prompts", "unreadable", "met in training", "share"), files
            )
        )
    else:
        notes.append("No evaluation files were given (validate.evaluation_files).")
    if examples:
        notes.append("Examples are below; data/card/findings.parquet has all findings.")
        listed = [
            (leaked.rule, leaked.kind, leaked.where, leaked.reason, other, leaked.similarity)
            for leaked, _, other, _ in examples
        ]
        tables.append(CardTable(("rule", "kind", "row", "finding", "other", "similarity"), listed))
    return CardSection("Leakage and near duplicates", notes, tables)


def _count(numbers: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these counts that there is, as a whole number."""
    return next((int(numbers[name]) for name in names if name in numbers), None)

"""The data card, put together from what stages collect and validate know: Markdown and a page.

It is the data report ``card`` of ``rlhf.data_reports``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from scipy import stats

from rlhf_core.config.data import AUTOMATIC_ROWS, RULES, NearDuplicatesConfig, ValidateConfig
from rlhf_core.data.row_counts import ReasonCounts, RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.statistics import PERCENTILES, SEQUENCE, TokenCounts, percentiles
from rlhf_core.data.text import excerpt, safe_text, shortened
from rlhf_core.data.validation.data_reports import CheckedData
from rlhf_core.data.validation.suites import NOT_DERIVED, SOURCE_PASSED, Suites
from rlhf_core.data.validation.tables import Validated
from rlhf_core.evaluation.figures import COLOURS, SERIES, draw_svg, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def balance(counts: Mapping[str, int]) -> float | None:
    """Return Pielou's evenness, 1 where all are equally frequent; None for fewer than two.

    It is the entropy over its maximum.
    """
    if len(counts) < 2:
        return None
    entropy = float(stats.entropy(list(counts.values())))
    return entropy / math.log(len(counts))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends with an s: "1 pair", "2 pairs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Histogram:
    """How many lengths lie in (2^(i-1), 2^i], for every i from the first needed to the last."""

    title: str
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, lengths: npt.NDArray[np.int64]) -> Histogram:
        """Count ``lengths``, at least one; an empty text counts as one character."""
        exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
        first = int(exponents.min())
        counts = np.bincount(exponents - first)
        edges = tuple(2 ** (first + i) for i in range(len(counts)))
        return cls(title, edges, tuple(counts.tolist()))


@dataclass(frozen=True)
class CardTable:
    """A table; cells are text, numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str | float | int | None, ...]]

    @property
    def numeric(self) -> list[bool]:
        """By column, whether it holds no text and is aligned to the right, with its heading."""
        if not self.rows:
            return [False] * len(self.header)
        numeric = []
        for column in zip(*self.rows, strict=True):
            numeric.append(not any(isinstance(cell, str) for cell in column))
        return numeric


@dataclass(frozen=True)
class CardSection:
    """A heading with what follows it; ``quotes_rows`` if texts of the data are quoted in it."""

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
        rows = []
        for histogram in section.histograms:
            bins = f"{histogram.edges[0]} to {histogram.edges[-1]}"
            rows.append((histogram.title, bins, _bars(histogram)))
        yield _table(CardTable(("histogram", "bins, in powers of two", ""), rows))


def _table(table: CardTable) -> str:
    rule = "|"
    for numeric in table.numeric:
        rule += "---:|" if numeric else "---|"
    lines = [_line([_text(cell) for cell in table.header]), rule]
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
    """Return whether a cell needs room: a text that may fill lines, or a long path or word."""
    if not isinstance(cell, str):
        return False
    longest_word = max(map(len, cell.split()), default=0)
    return len(cell) > SHORT_TEXT or longest_word > LONGEST_WORD


def breakable(text: str) -> Markup:
    """Return a text, escaped, that may break after folders of a path and parts of a name."""
    parts = re.split(r"(?<=[/_])", shortened(text, LONGEST_CELL))
    return Markup("<wbr>").join(map(escape, parts))


def _bar_chart(histogram: Histogram) -> Markup:
    return bar_chart([str(edge) for edge in histogram.edges], histogram.counts, histogram.title)


MOST_LABELS, BAR_FONT_SIZE = 6, 17  # at most so many labels fit below the axis


def bar_chart(labels: Sequence[str], values: Sequence[float], title: str) -> Markup:
    """Draw a bar per value over its label, and the largest value above its bar.

    All values are read aloud.
    """

    def draw(axes: Axes) -> None:
        axes.bar(range(len(values)), values, width=0.92, color=SERIES[0])
        every = -(-len(labels) // MOST_LABELS)
        shown = [label.replace("$", r"\$") for label in labels[::every]]
        axes.set_xticks(range(0, len(labels), every), shown)
        axes.tick_params(labelsize=BAR_FONT_SIZE)
        axes.set_yticks([])
        axes.axhline(0, color=COLOURS["line"], linewidth=1)
        axes.margins(x=0.01, y=0.14)
        largest = max(range(len(values)), key=values.__getitem__)
        axes.annotate(
            format_number(values[largest]),
            (largest, values[largest]),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=COLOURS["soft"],
            fontsize=BAR_FONT_SIZE,
        )

    listed = []
    for label, value in zip(labels, values, strict=True):
        listed.append(f"{label}: {format_number(value)}")
    return draw_svg(draw, f"{title}; {', '.join(listed)}")


TITLE = "Data card"


def write_card(folder: Path, data: CheckedData, config: ValidateConfig) -> None:
    """Write ``card.html``, ``card.md`` and ``release.md``, which quotes no texts of the data."""
    card = safe_card(build_card(data, config))
    (folder / "card.html").write_text(page(card, TITLE), encoding="utf-8")
    (folder / "card.md").write_text(markdown(card, TITLE, quotes=True), encoding="utf-8")
    (folder / "release.md").write_text(markdown(card, TITLE, quotes=False), encoding="utf-8")


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
        chosen = checked.raw.where(checked.frame["id"].isin(ids).to_numpy(bool))
        if not chosen.num_rows:
            continue
        numbers = iter(chosen.numbers.tolist())
        for part in chosen.parts(["id", *CONTENT_FIELDS[kind]]):
            for row in part.to_pylist():
                origin = RowFinding("", kind, "", **chosen.origin(next(numbers)), id=row["id"])
                beginning = excerpt(_content(row, CONTENT_FIELDS[kind]))
                rows.setdefault(row["id"], (origin.where, beginning))
    return rows


def _content(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    texts = []
    for turn in row.get("prompt") or ():
        if turn["role"] != "system":
            texts.append(turn["content"])
    texts += [row[name] for name in fields if name != "prompt"]
    return "\n".join(texts)


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
            counts = (*map(file.get, FILE_COUNTS), sum(of_file.values()))
            rows.append((*about_file, *counts, file.get("cut"), file.get("share")))
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


def _balance(sources: CheckedData) -> CardSection:
    pairs, notes, tables = sources.metrics.get("preferences", {}), [], []
    if "longer_preferred_share" in pairs:
        share, low, high = (pairs[f"longer_preferred_{of}"] for of in ("share", "low95", "high95"))
        notes.append(
            f"The longer reply is preferred in {share:.1%} of the pairs whose replies differ in length "
            f"(95 %: {low:.1%} to {high:.1%})."
        )
    if pairs.get("repeated_pairs"):
        repeated, contradicted = int(pairs["repeated_pairs"]), int(pairs["contradicted_pairs"])
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
        rows = [(name, count, count / total) for name, count in languages.most_common(CATEGORIES)]
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
    found, notes = sources.set_findings, []
    rows = []
    for kind, numbers in sources.metrics.items():
        if isinstance(numbers, Mapping) and "test_prefix_leaks" in numbers:
            rows.append((kind, *(_count(numbers, name) for name in LEAKS)))
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
    known = [numbers[name] for name in names if name in numbers]
    return int(known[0]) if known else None

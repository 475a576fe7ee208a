"""Data files checked as collect and validate do, without a workspace (``rlhf data validate``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.config.data import CollectConfig, FileSources, ValidateConfig
from rlhf_core.config.recipe import expectations_of
from rlhf_core.data.collection.rows import DERIVED_FROM
from rlhf_core.data.row_counts import BY_WORD, ReasonCount, ReasonCounts, RowCounts, RowFinding
from rlhf_core.data.schema import ROW_TYPES, read_table
from rlhf_core.data.statistics import PERCENTILES, UNWRITABLE
from rlhf_core.data.validation.data_reports import FINDINGS_FILE
from rlhf_core.errors import GateFailed
from rlhf_core.gates import GateDecision
from rlhf_core.stages import collect, validate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import read_json
from rlhf_core.training.run_context import RunContext
from rlhf_extras.data_files.report_lines import column_lines, percentile_table, wrapped

SHOWN_REASONS = 8
WARNED = "warned_"
LINE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
# What is said of a file as JSON.
FILE_VALUES = (
    "source",
    "kind",
    "format",
    "records",
    "expanded",
    "kept",
    "refused",
    "cut",
    *BY_WORD,
)


@dataclass(frozen=True)
class CheckedFiles:
    """What the pipeline would make of files.

    Attributes:
        kinds: Rows by kind: ``raw`` with the refused ones, and ``clean`` ones.
        derived: By derived kind, what it is derived from.
        files: What became of the rows of each file, with the refusals of both stages.
        refused: Rows of files that were refused, with ``source``, ``position``, ``kind`` and all
            ``reasons``; what was derived from them is not listed.
        warned: By kind and rule of severity ``warn``, the rows that stay although they break it.
        tokens: By kind of the files and text column, percentiles of tokens of clean rows; none
            without a tokenizer.
        unwritable: Clean rows of the files that have no tokens, by kind and reason, commonest
            first.
        gate: The data gate with the conditions that concern the kinds at hand.
    """

    files: Sequence[RowCounts]
    refused: Sequence[Mapping[str, Any]]
    kinds: Mapping[str, Mapping[str, int]]
    derived: Mapping[str, str]
    warned: Mapping[str, Mapping[str, int]]
    tokens: Mapping[str, Mapping[str, Mapping[str, int]]]
    unwritable: Sequence[ReasonCount]
    gate: GateDecision

    @property
    def passed(self) -> bool:
        """Whether the data gate would open."""
        return self.gate.passed

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        values: dict[str, Any] = {"passed": self.passed, **vars(self)}
        del values["gate"]
        values["conditions"] = self.gate.as_dict()["conditions"]
        values["files"] = []
        for file in self.files:
            values["files"].append({name: getattr(file, name) for name in FILE_VALUES})
        values["unwritable"] = []
        for count in self.unwritable:
            values["unwritable"].append(
                {
                    "kind": count.first.kind,
                    "reason": count.reason,
                    "rows": count.rows,
                    "source": count.first.source,
                    "position": count.first.position,
                }
            )
        return values


def check_files(
    sources: FileSources,
    base: Path,
    config: ValidateConfig,
    folder: Path,
    workspace: Path | None = None,
) -> CheckedFiles:
    """Collect and validate files as the pipeline would, in ``folder``.

    Where there are preferences, missing kinds are derived from them, as the pipeline does. Without
    them, conditions of the data gate on kinds that cannot be derived are left out.

    Args:
        base: The folder that relative paths start at.
        folder: An empty folder, in which the paths are those of a workspace.
        workspace: Whose expectations hold; by default those in ``base``, else the project's.

    Raises:
        DataError: A file is missing or of an unknown format.
    """
    raw = folder / collect.STAGE.outputs["raw"]
    collect.collect(collected_from(sources, config.seed), base, raw)
    outputs = Paths({name: folder / path for name, path in validate.STAGE.outputs.items()})
    about = read_json(raw / "manifest.json")["kinds"]
    given = [kind for kind in ROW_TYPES if sources.of(kind)]
    kinds = [kind for kind in ROW_TYPES if kind in given or _is_derived(kind, given)]
    inputs = Paths({"raw": raw, "expectations": expectations_of(workspace or base)})
    with suppress(GateFailed):  # which is a result
        validate.run(config, inputs, outputs, RunContext(folder / "work"), kinds)
    columns = ["source", "position", "kind", "reasons"]
    quarantined = read_table(outputs.quarantine, columns).to_pylist()
    refused = [row for row in quarantined if row["kind"] in given]
    refused.sort(key=lambda row: (row["source"], row["position"]))
    files = []
    for kind in given:
        files += [_counted(kind, file, refused) for file in about[kind]["files"]]
    metrics = read_json(outputs.metrics)
    rows: dict[str, dict[str, int]] = {}
    warned: dict[str, dict[str, int]] = {}
    for kind in kinds:
        of_kind = metrics[kind]
        rows[kind] = {name: int(of_kind[name]) for name in ("raw", "clean")}
        warned[kind] = {}
        for name, number in of_kind.items():
            if name.startswith(WARNED):
                warned[kind][name.removeprefix(WARNED)] = int(number)
    tokens = {}
    if config.tokenizer:
        tokens = {kind: _tokens(metrics[kind]) for kind in given}
    return CheckedFiles(
        files=files,
        refused=refused,
        kinds=rows,
        derived={kind: about[kind]["derived_from"] for kind in kinds if kind not in given},
        warned=warned,
        tokens=tokens,
        unwritable=_unwritable(outputs.card / FINDINGS_FILE, given),
        gate=GateDecision.load(outputs.gate),
    )


def _unwritable(findings: Path, given: Sequence[str]) -> list[ReasonCount]:
    """Return why rows of the given kinds have no tokens, the commonest reason first."""
    rows = [RowFinding(**row) for row in read_table(findings).to_pylist()]
    counts: list[ReasonCount] = []
    for kind in given:
        of_kind = [row for row in rows if row.rule == UNWRITABLE and row.kind == kind]
        counts += ReasonCounts.of(of_kind).commonest()
    return sorted(counts, key=lambda count: -count.rows)


def collected_from(sources: FileSources, seed: int) -> CollectConfig:
    """Return the settings by which files alone are collected."""
    return CollectConfig(source="files", files=sources, annotations=None, seed=seed)


def _is_derived(kind: str, given: Sequence[str]) -> bool:
    """Return whether rows of a kind that is not given come from those that are."""
    parents = DERIVED_FROM.get(kind, ())
    return any(parent in given or _is_derived(parent, given) for parent in parents)


def _tokens(metrics: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return the percentiles of tokens by text column from the metrics of a kind."""
    end = f"_tokens_{PERCENTILES[0]}"
    columns = [name.removesuffix(end) for name in metrics if name.endswith(end)]
    percentiles = {}
    for column in columns:
        shown = column.replace("_and_", " + ")
        percentiles[shown] = {str(p): int(metrics[f"{column}_tokens_{p}"]) for p in PERCENTILES}
    return percentiles


def _counted(kind: str, file: Mapping[str, Any], refused: Sequence[Mapping[str, Any]]) -> RowCounts:
    """Return the counts of a file, given its entry in the manifest and all refused rows."""
    counts = RowCounts.of_manifest(kind, file)
    rows = [row for row in refused if row["kind"] == kind and row["source"] == counts.source]
    counts.kept -= len(rows) - counts.refused
    counts.refused = len(rows)
    findings = []
    for row in rows:
        for reason in row["reasons"]:
            findings.append(RowFinding("", kind, reason, row["source"], row["position"]))
    counts.reasons = ReasonCounts.of(findings)
    return counts


def _listed(source: str | None, positions: Sequence[int], rows: int = 1) -> str:
    """Return the first positions of some rows in words, lines where a file is read by lines."""
    suffixes = PurePosixPath(source or "").suffixes
    unit = "line" if set(suffixes) & set(LINE_SUFFIXES) else "row"
    if rows > 1:
        unit += "s"
    more = f" and {rows - len(positions)} more" if rows > len(positions) else ""
    return f"{unit} {', '.join(map(str, positions))}{more}"


def as_text(checked: CheckedFiles, width: int = 80) -> str:
    """Return lines about each file, derived rows, warnings, tokens, and the data gate."""
    blocks = []
    for file in checked.files:
        lines = [file.source, f"  read     {file.records} as {file.kind} ({file.format})"]
        if file.expanded:
            lines.append(f"  expanded {file.expanded}: rows on top of one per record")
        lines += [f"  kept     {file.kept}", f"  refused  {file.refused}"]
        for count in file.reasons.commonest():
            where = _listed(file.source, count.positions, count.rows)
            lines += wrapped(f"    {count.rows}  ", f"{count.reason} (at {where})", width)
        for reason, dropped in file.dropped.items():
            lines += wrapped("  dropped  ", f"{dropped}: {reason}", width)
        blocks.append([*lines, *column_lines(file, width)])
    blocks.append(["derived"])
    for kind, parents in checked.derived.items():
        clean, raw = checked.kinds[kind]["clean"], checked.kinds[kind]["raw"]
        blocks[-1].append(f"  {kind:<14}  {clean} of {raw} rows, from {parents}")
    blocks.append(["warnings: rows that stay"])
    for kind, rules in checked.warned.items():
        for rule, warned in rules.items():
            if warned:
                blocks[-1].append(f"  {kind:<14}  {rule:<28}  {warned}")
    blocks = [lines for lines in blocks if len(lines) > 1]
    for kind, columns in checked.tokens.items():
        rows = {name: list(values.values()) for name, values in columns.items()}
        lines = [f"tokens of {kind}"]
        if rows:
            lines += percentile_table("", rows, width)
        unwritable = [count for count in checked.unwritable if count.first.kind == kind]
        for count in unwritable[:SHOWN_REASONS]:
            source = count.first.source
            where = f"first at {_listed(source, count.positions[:1])} of {source}"
            lines += wrapped(f"  none for {count.rows}: ", f"{count.reason} ({where})", width)
        if len(unwritable) > SHOWN_REASONS:
            further = sum(count.rows for count in unwritable[SHOWN_REASONS:])
            lines.append(f"  none for {further} further rows")
        blocks.append(lines)
    failed = checked.gate.failed
    held = "it would open"
    if failed:
        held = f"{len(failed)} of {len(checked.gate.conditions)} conditions do not hold"
    blocks.append([f"data gate: {held}"])
    for condition in failed:
        blocks[-1] += wrapped("  ", f"{condition}: {condition.why}", width)
    return "\n\n".join("\n".join(lines) for lines in blocks)

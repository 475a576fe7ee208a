"""Stage collect: rows of four kinds, from the synthetic world, or from files and hub ids."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.data import CollectConfig
from rlhf_core.data.collection.raw_folder import CountedSource, RawFolder, write_sources
from rlhf_core.data.collection.rows import derived_from
from rlhf_core.data.collection.sources import (
    annotation_sources,
    read_sources,
    require_kept,
    source_chunks,
    source_files,
)
from rlhf_core.data.readers.detection import unused_lines, warnings_of
from rlhf_core.data.row_counts import REFUSED_SCHEMA, RowCounts, RowFinding, findings_table
from rlhf_core.data.schema import ROW_TYPES, content_id, write_dicts, write_table
from rlhf_core.errors import DataError
from rlhf_core.runtime.progress import progress
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.storage.files import atomic_dir, atomic_write_json, read_json, sha256_file
from rlhf_core.training.run_context import RunContext
from rlhf_core.world import corpus
from rlhf_core.world.questions import parse_prompt

KINDS = tuple(ROW_TYPES)
logger = logging.getLogger(__name__)


def run(
    config: CollectConfig, inputs: Paths, outputs: Paths, context: RunContext
) -> dict[str, float]:
    """Collect the data of a pipeline, with relative paths of sources from the workspace.

    Raises:
        DataError: A file is missing, of an unknown format or in a folder that stages replace, or no
            preferences are named.
    """
    if config.source == "files" and config.pairs and not config.files.preferences:
        raise DataError(
            "collect.source is files, but collect.files.preferences is empty: name files with pairs of replies, or set "
            "collect.pairs to false where reward functions do without"
        )
    if not (config.pairs or config.files.prompts or config.files.demonstrations):
        raise DataError(
            "collect.files names neither prompts nor demonstrations: name files with prompts"
        )
    workspace = outputs.raw.parents[1]
    require_kept(config.files.paths() if config.source == "files" else (), workspace)
    metrics = collect(config, workspace, outputs.raw)
    for kind, about in read_json(outputs.raw / "manifest.json")["kinds"].items():
        for file in about["files"]:
            counts = RowCounts.of_manifest(kind, file)
            for line in [*warnings_of(counts), *unused_lines(counts)]:
                logger.warning("%s: %s", counts.source, line)
    return metrics


def collect(config: CollectConfig, base: Path, raw: Path) -> dict[str, float]:
    """Write the rows of each kind, those that readers refused, and a manifest into ``raw``.

    The rows of a kind are in ``KIND/data.parquet``. Rows of files have their file and line in
    ``provenance.parquet``. A kind that is neither given nor derived is empty. Files are read and
    written in parts, so that they may be larger than the memory.

    Args:
        base: The folder that relative paths of sources start at.

    Raises:
        DataError: A file is missing or of an unknown format.
    """
    with atomic_dir(raw) as folder:
        if config.source == "world":
            collected = _from_world(config, base, folder)
        else:
            collected = _from_files(config, base, folder)
        atomic_write_json(folder / "manifest.json", _manifest(config, collected, folder))
    metrics = {f"{kind}_rows": float(collected.rows[kind]) for kind in KINDS}
    refused = 0
    for sources in collected.sources.values():
        refused += sum(source.counts.refused for source in sources)
    metrics["refused_rows"] = float(refused)
    if config.source == "files":
        metrics["cut_rows"] = float(sum(collected.cut.values()))
    return metrics


STAGE = Stage(name="collect", config=CollectConfig, run=run, outputs={"raw": "data/raw"})


@dataclass(frozen=True)
class Collected:
    """What was written.

    Attributes:
        rows: Rows by kind.
        cut: Rows by kind that a limit left out.
        derived: By kind, what it is derived from, or an empty text.
        sources: The sources by kind.
    """

    rows: dict[str, int]
    cut: dict[str, int]
    derived: dict[str, str]
    sources: dict[str, list[CountedSource]]


def _from_world(config: CollectConfig, base: Path, folder: Path) -> Collected:
    """Generate all kinds from the synthetic world, annotated pairs before its own."""
    world, seed = config.world, config.seed

    def size(n: int) -> int:
        return min(n, config.limit) if config.limit else n

    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "preferences": lambda: corpus.preferences(
            seed,
            size(world.preferences),
            contrast_share=world.contrast_share,
            sharpness=world.label_sharpness,
            length_bias=world.length_bias,
        ),
        "demonstrations": lambda: corpus.demonstrations(seed, size(world.demonstrations)),
        "prompts": lambda: corpus.prompts(seed),
        "pretrain": lambda: corpus.pretrain(seed, size(world.pretrain)),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    with progress(len(KINDS), "generating data of the synthetic world") as bar:
        for kind, make in makers.items():
            rows[kind] = make()
            bar.advance()
    sources: dict[str, list[CountedSource]] = {kind: [] for kind in KINDS}
    given: list[dict[str, Any]] = []
    refused: list[RowFinding] = []
    for part in read_sources(annotation_sources(config.annotations, base), "preferences", base):
        sources["preferences"].append(CountedSource(part.counts))
        given += part.rows
        refused += part.refused
    for row in given:  # an annotated pair is in the split of its prompt
        question = parse_prompt(row["prompt"][-1]["content"])
        if question:
            row["group"] = question.group
    rows["preferences"] = given + rows["preferences"]
    counts = {}
    for kind in KINDS:
        listed = [row | {"id": content_id(kind, row)} for row in rows[kind][: config.limit]]
        write_dicts(folder / kind / "data.parquet", kind, listed)
        counts[kind] = len(listed)
    write_table(folder / "refused.parquet", findings_table(refused, REFUSED_SCHEMA))
    return Collected(counts, dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, ""), sources)


def _from_files(config: CollectConfig, base: Path, folder: Path) -> Collected:
    sources_of = {kind: list(config.files.of(kind)) for kind in KINDS}
    if config.pairs:
        sources_of["preferences"] += annotation_sources(config.annotations, base)
    files = {kind: source_files(sources_of[kind], base) for kind in KINDS}
    derived = derived_from([kind for kind in KINDS if files[kind]], config.also_derive)
    size = 0
    for listed in files.values():
        size += sum(file.path.stat().st_size for file in listed if file.path)
    # What is also derived comes before what it is derived from.
    first = [kind for kind in reversed(KINDS) if kind in config.also_derive]
    sources: dict[str, list[CountedSource]] = {kind: [] for kind in KINDS}
    with (
        progress(max(size, 1), "reading data files (bytes)") as bar,
        RawFolder(folder, derived, config.limit) as raw,
    ):
        for kind in dict.fromkeys([*first, *KINDS]):
            parts = (
                (source_chunks(file, kind, config.limit, bar.advance), file.options)
                for file in files[kind]
            )
            sources[kind] = write_sources(raw, kind, parts)
    cut = {}
    for kind in KINDS:
        cut[kind] = raw.cut[kind] + sum(source.counts.cut for source in sources[kind])
    return Collected(raw.rows, cut, derived, sources)


def _manifest(config: CollectConfig, collected: Collected, folder: Path) -> dict[str, Any]:
    """Return where each kind comes from: its files with hashes and counts, or other kinds."""
    kinds = {}
    for kind in KINDS:
        rows = collected.rows[kind]
        kinds[kind] = {
            "rows": rows,
            "sha256": sha256_file(folder / kind / "data.parquet"),
            "derived_from": collected.derived[kind],
            "files": [source.about(rows, config.licence) for source in collected.sources[kind]],
        }
        if config.source == "files":
            kinds[kind]["cut"] = collected.cut[kind]
        if kind in config.also_derive:
            read = sum(source.counts.kept for source in collected.sources[kind])
            kinds[kind]["derived_rows"] = rows - read
    about = {
        "source": config.source,
        "pairs": config.pairs,
        "seed": config.seed,
        "limit": config.limit,
    }
    return {**about, "kinds": kinds}

"""Stage collect: rows of four kinds from the synthetic world, or from files and hub ids of any known format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.collect import CollectConfig
from rlhf_core.data.derived import Rows, derive_missing
from rlhf_core.data.formats import FileRows, cut_to_limit
from rlhf_core.data.schema import ROW_TYPES, content_id, write_dicts
from rlhf_core.data.sources import read_source, source_files
from rlhf_core.data.validation.provenance import write_provenance
from rlhf_core.data.validation.quarantine import write_refused
from rlhf_core.errors import DataError
from rlhf_core.files import atomic_dir, atomic_write_json, sha256_file
from rlhf_core.progress import progress
from rlhf_core.stages.runtime.contract import Paths, Stage
from rlhf_core.training.run_context import RunContext
from rlhf_core.world import corpus

KINDS = tuple(ROW_TYPES)


def run(config: CollectConfig, inputs: Paths, outputs: Paths, context: RunContext) -> dict[str, float]:
    """Write ``data/raw/KIND/data.parquet``, the rows that readers refused, and a manifest of all sources.

    Rows of files have their file and line in ``data/raw/provenance.parquet``.

    Relative paths of sources start at the workspace.

    Raises:
        DataError: A file is missing or of an unknown format, or no preferences are named.
    """
    workspace = outputs.raw.parents[1]
    files: dict[str, list[FileRows]] = {kind: [] for kind in KINDS}
    if config.source == "world":
        rows, derived = _from_world(config), dict.fromkeys(KINDS, "")
    else:
        files = _read_files(config, workspace)
        for kind in KINDS:
            cut_to_limit(files[kind], config.limit)
        rows, derived = derive_missing({kind: _with_origin(files[kind]) for kind in KINDS if files[kind]})
    kept = {kind: listed[: config.limit] for kind, listed in rows.items()}
    cut = {kind: sum(file.cut for file in files[kind]) + len(rows[kind]) - len(kept[kind]) for kind in KINDS}
    rows = kept
    with atomic_dir(outputs.raw) as folder:
        for kind in KINDS:
            write_dicts(folder / kind / "data.parquet", kind, rows[kind])
        if config.source == "files":
            write_provenance(folder / "provenance.parquet", rows)
        refused = [{"kind": kind, **row} for kind in KINDS for file in files[kind] for row in file.refused]
        write_refused(folder / "refused.parquet", refused)
        atomic_write_json(folder / "manifest.json", _manifest(config, rows, derived, files, cut, folder))
    metrics = {f"{kind}_rows": float(len(rows[kind])) for kind in KINDS} | {"refused_rows": float(len(refused))}
    return metrics if config.source == "world" else metrics | {"cut_rows": float(sum(cut.values()))}


STAGE = Stage(name="collect", section="collect", config=CollectConfig, run=run, outputs={"raw": "data/raw"})


def _from_world(config: CollectConfig) -> Rows:
    """Generate all kinds from the synthetic world, with ids by the schema's rule."""
    world, seed = config.world, config.seed

    def size(n: int) -> int:
        return min(n, config.limit) if config.limit else n

    rows: Rows = {}
    with progress(len(KINDS), "generating data of the synthetic world") as bar:
        rows["preferences"] = corpus.preferences(
            seed,
            size(world.preferences),
            contrast_share=world.contrast_share,
            sharpness=world.label_sharpness,
            length_bias=world.length_bias,
        )
        bar.advance()
        rows["demonstrations"] = corpus.demonstrations(seed, size(world.demonstrations))
        bar.advance()
        rows["prompts"] = corpus.prompts(seed)
        bar.advance()
        rows["pretrain"] = corpus.pretrain(seed, size(world.pretrain))
        bar.advance()
    return {kind: [row | {"id": content_id(kind, row)} for row in listed] for kind, listed in rows.items()}


def _read_files(config: CollectConfig, workspace: Path) -> dict[str, list[FileRows]]:
    if not config.files.preferences:
        raise DataError(
            "collect.source is files, but collect.files.preferences is empty: name files with pairs of replies"
        )
    sources = {kind: source_files(config.files.of(kind), workspace) for kind in KINDS}
    read: dict[str, list[FileRows]] = {}
    with progress(sum(map(len, sources.values())), "reading data files") as bar:
        for kind in KINDS:
            read[kind] = []
            for source in sources[kind]:
                read[kind].append(read_source(source, kind, config.limit))
                bar.advance()
    return read


def _with_origin(files: Sequence[FileRows]) -> list[dict[str, Any]]:
    """Return the rows of all files, each with the path and position that it was read from."""
    return [
        row | {"path": file.source, "position": position}
        for file in files
        for row, position in zip(file.rows, file.positions, strict=True)
    ]


def _manifest(
    config: CollectConfig,
    rows: Rows,
    derived: dict[str, str],
    files: dict[str, list[FileRows]],
    cut: dict[str, int],
    folder: Path,
) -> dict[str, Any]:
    """Return where each kind comes from: source files with hashes, formats and counts, or the kinds it derives from."""
    kinds = {}
    for kind in KINDS:
        listed = [
            {
                "source": file.source,
                "sha256": file.sha256,
                "format": file.format,
                "records": file.records,
                "rows": len(file.rows),
                "refused": len(file.refused),
                "dropped": dict(file.dropped),
                "unused": dict(file.unused),
                "expanded": file.expanded,
                "cut": file.cut,
                "unread": file.unread,
                "weight": file.weight,
                "cap": file.cap,
                "share": len(file.rows) / len(rows[kind]) if rows[kind] else 0.0,
            }
            for file in files[kind]
        ]
        kinds[kind] = {
            "rows": len(rows[kind]),
            "sha256": sha256_file(folder / kind / "data.parquet"),
            "derived_from": derived[kind],
            "files": listed,
        }
        if config.source == "files":
            kinds[kind]["cut"] = cut[kind]
    return {"source": config.source, "seed": config.seed, "limit": config.limit, "kinds": kinds}

"""Rows of all kinds for tests of validation, as stage collect writes them or in memory, and runs of
both stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.config.data import CollectConfig, FileSources, SplitConfig, ValidateConfig
from rlhf_core.data.collection.raw_folder import Origins, StoredRows
from rlhf_core.data.collection.rows import prompt_group
from rlhf_core.data.row_counts import REFUSED_SCHEMA, RowFinding, findings_table
from rlhf_core.data.schema import (
    ROW_TYPES,
    PairUser,
    arrow_schema,
    content_id,
    pair_user_of,
    split_of,
    write_dicts,
    write_table,
)
from rlhf_core.data.validation.set_rules import SetRows
from rlhf_core.data.validation.suites import Suites, read_suites
from rlhf_core.stages import collect, validate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext

Rows = dict[str, list[dict[str, Any]]]
SUITES = Path(__file__).resolve().parents[2] / "expectations"
SPLIT = SplitConfig()
PART_ROWS = 2


def suites_of(derived: Sequence[str] = (), **settings: Any) -> Suites:
    """Return the project's suites with settings of section validate."""
    return read_suites(SUITES, ValidateConfig.model_validate(settings), derived)


def make_row(kind: str, i: int, **changes: Any) -> dict[str, Any]:
    """Return a row of any kind whose texts hold the number ``i``."""
    prompt = changes.get("prompt", [{"role": "user", "content": f"Question {i}?"}])
    row = {
        "prompt": prompt,
        "chosen": f"good {i}",
        "rejected": f"bad {i}",
        "reply": f"good {i}",
        "text": f"text {i}",
        "columns": None,
        "margin": None,
        "category": "c",
        "source": "s",
        "group": prompt_group(prompt),
    } | changes
    return row | {"id": content_id(kind, row)}


def good_rows(n: int = 120) -> Rows:
    """Return ``n`` rows of each kind without a fault."""
    return {kind: [make_row(kind, i) for i in range(n)] for kind in ROW_TYPES}


def run_validate(
    rows: Rows,
    workspace: Path,
    derived: Sequence[str] = (),
    refused: Sequence[RowFinding] = (),
    expectations: Path = SUITES,
    **settings: Any,
) -> tuple[dict[str, Any], Paths]:
    """Write ``rows`` as stage collect does, run stage validate, and return its metrics and
    outputs.
    """
    raw = workspace / "data" / "raw"
    for kind, listed in rows.items():
        names = [name for name in ROW_TYPES[kind].__dataclass_fields__ if name != "KIND"]
        write_dicts(
            raw / kind / "data.parquet",
            kind,
            [{name: row[name] for name in names} for row in listed],
        )
    write_table(raw / "refused.parquet", findings_table(refused, REFUSED_SCHEMA))
    kinds = {
        kind: {"derived_from": "others" if kind in derived else "", "files": []} for kind in rows
    }
    (raw / "manifest.json").write_text(json.dumps({"source": "files", "kinds": kinds}))
    return validate_raw(workspace, expectations, **settings)


def collect_files(
    workspace: Path, files: Mapping[str, Any] | FileSources, **settings: Any
) -> dict[str, Any]:
    """Run stage collect over files, and return its metrics."""
    config = CollectConfig.model_validate({"source": "files", "files": files, **settings})
    raw = Paths({"raw": workspace / "data/raw"})
    return dict(collect.run(config, Paths({}), raw, RunContext(workspace / "work")))


def validate_raw(
    workspace: Path, expectations: Path = SUITES, **settings: Any
) -> tuple[dict[str, Any], Paths]:
    """Run stage validate over what stage collect wrote, and return its metrics and outputs."""
    outputs = Paths({key: workspace / path for key, path in validate.STAGE.outputs.items()})
    inputs = Paths({"raw": workspace / "data/raw", "expectations": expectations})
    return dict(
        validate.run(ValidateConfig(**settings), inputs, outputs, RunContext(workspace / "work"))
    ), outputs


def dialogue(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def group_of(split: str, user: PairUser = PairUser.REWARD) -> str:
    """A group that the hash puts into ``split``, and whose pairs are ``user``'s where it is not
    test.
    """
    names = (f"g{i}" for i in range(10_000))
    return next(
        g
        for g in names
        if split_of(g, 1, SPLIT) == split and (split == "test" or pair_user_of(g, 1, SPLIT) == user)
    )


def row(
    kind: str, i: int, split: str, *turns: str, user: PairUser = PairUser.REWARD
) -> dict[str, Any]:
    return make_row(kind, i, prompt=dialogue(*turns), group=group_of(split, user))


def set_of(**rows: list[dict[str, Any]]) -> SetRows:
    return SetRows({kind: memory_rows(kind, rows.get(kind, [])) for kind in ROW_TYPES}, 1, SPLIT)


@dataclass(frozen=True)
class MemoryRows(StoredRows):
    """The rows of a table, two at a time."""

    table: pa.Table = None

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        rows = self.table.take(pa.array(self.numbers)).select(
            list(columns or arrow_schema(self.kind).names)
        )
        for start in range(0, rows.num_rows, PART_ROWS):
            yield rows.slice(start, PART_ROWS).combine_chunks()


def memory_rows(
    kind: str, rows: Sequence[Mapping[str, Any]], origins: Origins | None = None
) -> MemoryRows:
    schema = arrow_schema(kind)
    table = pa.Table.from_pylist(
        [{name: row[name] for name in schema.names} for row in rows], schema=schema
    )
    return MemoryRows(kind, Path("memory"), len(rows), None, origins, table)


def origins_of(source: str, positions: Sequence[int]) -> Origins:
    return Origins([source], np.zeros(len(positions), np.int32), np.array(positions))

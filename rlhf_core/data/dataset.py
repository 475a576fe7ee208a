"""The clean data set: which rows go into which file, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.validate import SplitConfig
from rlhf_core.data.schema import write_table
from rlhf_core.data.splits import PairUser, assign, overlap, pair_user_of
from rlhf_core.data.validation.tables import Validated

Tables = dict[str, pa.Table]
Numbers = dict[str, float]


def split_tables(clean: Mapping[str, pa.Table], seed: int, config: SplitConfig) -> Tables:
    """Split the clean tables; return them by ``FOLDER/SPLIT``, as they are stored under ``data/clean``.

    ``preferences`` (the reward model's), ``preferences_referee`` and ``preferences_judge`` share no train or validation
    group; the test pairs are common.
    Pretraining text of test groups is left out: it may hold the very replies that are tested.
    """
    files: Tables = {}
    for kind, table in clean.items():
        groups = table.column("group").to_pylist()
        splits = np.array(assign(groups, seed, config), dtype=object)
        for split in ("train", "validation") if kind == "pretrain" else ("train", "validation", "test"):
            files[f"{kind}/{split}"] = table.filter(pa.array(splits == split))
    for split in ("train", "validation"):
        table = files[f"preferences/{split}"]
        users = np.array([pair_user_of(g, seed, config) for g in table.column("group").to_pylist()], dtype=object)
        for user in PairUser:
            files[f"{user}/{split}"] = table.filter(pa.array(users == user))
    return files


def write_splits(folder: Path, files: Tables) -> None:
    """Write ``FOLDER/SPLIT.parquet`` files."""
    for name, table in files.items():
        write_table(folder / f"{name}.parquet", table)


def group_overlap(files: Tables) -> int:
    """Count groups in more than one split, over all kinds, plus groups shared by two of the reward models."""
    by_split: dict[str, set[str]] = {}
    groups = {name: set(table.column("group").to_pylist()) for name, table in files.items()}
    for name, members in groups.items():
        by_split.setdefault(name.split("/")[1], set()).update(members)
    by_user = [set().union(*(groups[f"{user}/{split}"] for split in ("train", "validation"))) for user in PairUser]
    return overlap(by_split.values()) + overlap(by_user)


def rows_metric(folder: str, split: str) -> str:
    """Return the name that the number of rows of a file has in ``metrics/data.json``: ``preferences.judge_train``."""
    kind, _, user = folder.partition("_")
    return f"{kind}.{user}_{split}" if user else f"{kind}.{split}"


def data_metrics(
    validated: Validated, files: Tables, counts: Mapping[str, Numbers] | None = None
) -> dict[str, Numbers | float]:
    """Return rows, shares, mean lengths and further ``counts`` by kind; one level deep, all finite."""
    quarantined = Counter(row.kind for row in validated.quarantined)
    metrics: dict[str, Numbers | float] = {"group_overlap": float(group_overlap(files))}
    for kind, table in validated.clean.items():
        raw = validated.raw_rows[kind]
        numbers = {
            "raw": float(raw),
            "clean": float(table.num_rows),
            "quarantined": float(quarantined[kind]),
            "quarantined_share": validated.quarantined_share(kind),
            "groups": float(pc.count_distinct(table.column("group")).as_py()),
        }
        if validated.left_out[kind]:
            numbers["left_out"] = float(validated.left_out[kind])
        if validated.cut_rows.get(kind):
            numbers["cut"] = float(validated.cut_rows[kind])
        for name, part in files.items():
            section, _, metric = rows_metric(*name.split("/")).partition(".")
            if section == kind:
                numbers[metric] = float(part.num_rows)
        numbers |= _lengths(kind, table)
        numbers |= {f"failed_{check}": float(n) for check, n in sorted(validated.failed_checks[kind].items())}
        warned = validated.warned_checks.get(kind, Counter())
        numbers |= {f"warned_{check}": float(n) for check, n in sorted(warned.items())}
        metrics[kind] = numbers | (counts or {}).get(kind, {})
    pretrain = validated.clean["pretrain"].num_rows
    held_out = pretrain - sum(files[f"pretrain/{split}"].num_rows for split in ("train", "validation"))
    return metrics | {"pretrain_held_out": float(held_out)}


def _lengths(kind: str, table: pa.Table) -> Numbers:
    """Return the mean characters of each text column, and how often the chosen reply is the longer one."""
    if not table.num_rows:
        return {}
    numbers: Numbers = {}
    if "prompt" in table.column_names:
        turns = [len(message["content"]) for prompt in table.column("prompt").to_pylist() for message in prompt]
        numbers["mean_prompt_chars"] = sum(turns) / table.num_rows
    for name in ("chosen", "rejected", "reply", "text"):
        if name in table.column_names:
            numbers[f"mean_{name}_chars"] = float(pc.mean(pc.utf8_length(table.column(name))).as_py())
    if kind == "preferences":
        lengths = [pc.utf8_length(table.column(name)).to_numpy() for name in ("chosen", "rejected")]
        numbers["chosen_longer_share"] = float(np.mean(lengths[0] > lengths[1]))
        numbers["margin_known_share"] = 1.0 - table.column("margin").null_count / table.num_rows
    return numbers

"""The clean data set: which rows go into which file, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.schema import ROW_TYPES, arrow_schema
from rlhf_core.data.splits import SPLITS, PairUser, assign, pair_user_of
from rlhf_core.data.tables import TableWriter
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.data.validation.tables import Validated
from rlhf_core.runtime.progress import progress

Tables = dict[str, pa.Table]
Numbers = dict[str, float]
DIGEST_BYTES = 16
TEXTS = ("chosen", "rejected", "reply", "text")


def file_names() -> list[str]:
    """Return ``FOLDER/SPLIT`` of every file of the clean data.

    ``preferences`` (the reward model's), ``preferences_referee`` and ``preferences_judge`` share no train or validation
    group; the test pairs are common.
    Pretraining text of test groups is left out: it may hold the very replies that are tested.
    """
    names = [f"{kind}/{split}" for kind in ROW_TYPES for split in SPLITS if (kind, split) != ("pretrain", "test")]
    users = [user for user in PairUser if user is not PairUser.REWARD]
    return names + [f"{user}/{split}" for split in ("train", "validation") for user in users]


def split_parts(kind: str, table: pa.Table, seed: int, config: SplitConfig) -> Tables:
    """Return clean rows of a kind by the file that they go into; see :func:`file_names`."""
    groups = table.column("group").to_pylist()
    splits = np.array(assign(groups, seed, config), dtype=object)
    parts = {name: table.filter(pa.array(splits == name.split("/")[1])) for name in file_names() if _kind(name) == kind}
    if kind == "preferences":
        users = np.array([pair_user_of(group, seed, config) for group in groups], dtype=object)
        for split in ("train", "validation"):
            for user in PairUser:
                parts[f"{user}/{split}"] = table.filter(pa.array((splits == split) & (users == user)))
    return parts


def _kind(file: str) -> str:
    """The kind of rows in ``FOLDER/SPLIT``, or in one that belongs to a user of pairs."""
    return file.split("/")[0].partition("_")[0]


def write_clean(
    folder: Path, clean: Mapping[str, StoredRows], seed: int, config: SplitConfig
) -> dict[str, KindStatistics]:
    """Write ``FOLDER/SPLIT.parquet`` files, part by part; return what is to be known of the rows, by kind."""
    statistics = {kind: KindStatistics() for kind in clean}
    with progress(sum(rows.num_rows for rows in clean.values()), "writing clean data") as bar:
        for kind, rows in clean.items():
            with ExitStack() as stack:
                writers = {
                    name: stack.enter_context(TableWriter(folder / f"{name}.parquet", arrow_schema(kind)))
                    for name in file_names()
                    if _kind(name) == kind
                }
                for table in rows.parts():
                    parts = split_parts(kind, table, seed, config)
                    for name, part in parts.items():
                        writers[name].write(part)
                    statistics[kind].add(table, parts)
                    bar.advance(table.num_rows)
    return statistics


README = """\
---
configs:
{configs}
---
The clean data of a run. In Python:

    from datasets import load_dataset

    pairs = load_dataset("data/clean", "preferences")  # or another kind: {kinds}

For the RewardTrainer or the DPOTrainer of TRL, a reply becomes a list of one message, as the prompt is one:

    def messages(row):
        return {{name: [{{"role": "assistant", "content": row[name]}}] for name in ("chosen", "rejected")}}

    pairs = pairs.map(messages).select_columns(["prompt", "chosen", "rejected"])
"""


def write_readme(folder: Path) -> None:
    """Write README.md, by which ``datasets.load_dataset(folder)`` knows every kind as a config with its splits."""
    files = [name.split("/") for name in file_names()]
    kinds = list(dict.fromkeys(kind for kind, _ in files))
    lines = []
    for kind in kinds:
        lines += [f"- config_name: {kind}", *(["  default: true"] if kind == kinds[0] else []), "  data_files:"]
        lines += [f"  - {{split: {split}, path: {kind}/{split}.parquet}}" for of, split in files if of == kind]
    text = README.format(configs="\n".join(lines), kinds=", ".join(kinds))
    (folder / "README.md").write_text(text, encoding="utf-8")


@dataclass
class KindStatistics:
    """Counts and lengths of clean rows of a kind, taken part by part.

    Attributes:
        files: Rows of each file.
        groups: By file, hashes of the groups in it.
        all_groups: Hashes of the groups of all rows.
        characters: By text column, their sum; of prompts the sum over turns.
        chosen_longer: Pairs whose chosen reply is the longer one.
        margin_known: Pairs with a margin.
    """

    rows: int = 0
    files: Counter[str] = field(default_factory=Counter)
    groups: dict[str, list[pa.Array]] = field(default_factory=dict)
    all_groups: list[pa.Array] = field(default_factory=list)
    characters: Counter[str] = field(default_factory=Counter)
    chosen_longer: int = 0
    margin_known: int = 0

    def add(self, table: pa.Table, parts: Tables) -> None:
        """Take in rows and the files that they go into."""
        self.rows += table.num_rows
        self.all_groups.append(group_hashes(table))
        for name, part in parts.items():
            self.files[name] += part.num_rows
            self.groups.setdefault(name, []).append(group_hashes(part))
        if "prompt" in table.column_names:
            turns = pc.list_flatten(table.column("prompt"))
            self.characters["prompt"] += pc.sum(pc.utf8_length(pc.struct_field(turns, "content"))).as_py() or 0
        lengths = {name: pc.utf8_length(table.column(name)) for name in TEXTS if name in table.column_names}
        for name, values in lengths.items():
            self.characters[name] += pc.sum(values).as_py() or 0
        if "chosen" in lengths:
            self.chosen_longer += int((lengths["chosen"].to_numpy() > lengths["rejected"].to_numpy()).sum())
            self.margin_known += table.num_rows - table.column("margin").null_count

    def distinct_groups(self) -> int:
        """How many groups the rows are of."""
        return len(pc.unique(pa.chunked_array(self.all_groups, pa.binary(DIGEST_BYTES))))

    def lengths(self, kind: str) -> Numbers:
        """Mean characters of each text column, and how often the chosen reply is the longer one."""
        if not self.rows:
            return {}
        names = [name for name in ("prompt", *TEXTS) if name in self.characters]
        numbers = {f"mean_{name}_chars": self.characters[name] / self.rows for name in names}
        if kind == "preferences":
            numbers["chosen_longer_share"] = self.chosen_longer / self.rows
            numbers["margin_known_share"] = 1.0 - (self.rows - self.margin_known) / self.rows
        return numbers


def group_hashes(table: pa.Table) -> pa.Array:
    """Return a 128-bit hash of the group of each row."""
    digests = [blake2b(g.encode(), digest_size=DIGEST_BYTES).digest() for g in table.column("group").to_pylist()]
    return pa.array(digests, pa.binary(DIGEST_BYTES))


def group_overlap(groups: Mapping[str, Sequence[pa.Array]]) -> int:
    """Count groups in more than one split, over all kinds, plus groups shared by two of the reward models.

    Args:
        groups: By file, the groups of its rows, or hashes of them.
    """
    splits = [[name for name in groups if name.endswith(f"/{split}")] for split in SPLITS]
    users = [[f"{user}/{split}" for split in ("train", "validation")] for user in PairUser]
    return sum(
        _shared([[array for name in names for array in groups.get(name, ())] for names in sets])
        for sets in (splits, users)
    )


def _shared(sets: Iterable[Sequence[pa.Array]]) -> int:
    """How many values are in more than one of the sets."""
    distinct = [pc.unique(pa.chunked_array(arrays)) for arrays in sets if arrays]
    if not distinct:
        return 0
    counts = pc.value_counts(pa.concat_arrays(distinct)).field("counts")
    return int(pc.sum(pc.greater(counts, 1)).as_py() or 0)


def rows_metric(folder: str, split: str) -> str:
    """Return the name that the number of rows of a file has in ``metrics/data.json``: ``preferences.judge_train``."""
    kind, _, user = folder.partition("_")
    return f"{kind}.{user}_{split}" if user else f"{kind}.{split}"


def data_metrics(
    validated: Validated, statistics: Mapping[str, KindStatistics], counts: Mapping[str, Numbers] | None = None
) -> dict[str, Numbers | float]:
    """Return rows, shares, mean lengths and further ``counts`` by kind; one level deep, all finite."""
    groups = {name: arrays for of_kind in statistics.values() for name, arrays in of_kind.groups.items()}
    metrics: dict[str, Numbers | float] = {"group_overlap": float(group_overlap(groups))}
    for kind, of_kind in statistics.items():
        numbers = {
            "raw": float(validated.raw_rows[kind]),
            "clean": float(of_kind.rows),
            "quarantined": float(validated.quarantined_rows[kind]),
            "quarantined_share": validated.quarantined_share(kind),
            "groups": float(of_kind.distinct_groups()),
        }
        if validated.left_out[kind]:
            numbers["left_out"] = float(validated.left_out[kind])
        if validated.cut_rows.get(kind):
            numbers["cut"] = float(validated.cut_rows[kind])
        for name in file_names():
            if _kind(name) == kind:
                numbers[rows_metric(*name.split("/")).partition(".")[2]] = float(of_kind.files[name])
        numbers |= of_kind.lengths(kind)
        numbers |= {f"failed_{check}": float(n) for check, n in sorted(validated.failed_checks[kind].items())}
        warned = validated.warned_checks.get(kind, Counter())
        numbers |= {f"warned_{check}": float(n) for check, n in sorted(warned.items())}
        metrics[kind] = numbers | (counts or {}).get(kind, {})
    return metrics | {"pretrain_held_out": float(statistics["pretrain"].rows - statistics["pretrain"].files.total())}

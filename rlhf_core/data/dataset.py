"""The clean data set: which rows go into which file, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.config.data import SplitConfig
from rlhf_core.data.collection.raw_folder import StoredRows
from rlhf_core.data.schema import (
    CONTENT_FIELDS,
    ROW_TYPES,
    SPLITS,
    PairUser,
    assign,
    clean_schema,
    clean_table,
    pair_user_of,
)
from rlhf_core.data.statistics import (
    TokenCounts,
    character_lengths,
    cluster_name,
    design_effect,
    evenly_spread,
    wilson_bounds,
)
from rlhf_core.data.tables import TableWriter
from rlhf_core.data.validation.tables import Validated
from rlhf_core.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tables = dict[str, pa.Table]
Numbers = dict[str, float]
DIGEST_BYTES = 16
ALL = "all"


def file_names(kind: str = "") -> list[str]:
    """Return ``FOLDER/SPLIT`` of every file of the clean data, or of those with rows of one kind.

    ``preferences`` (the reward model's), ``preferences_referee`` and ``preferences_judge`` share no
    train or validation group; the test pairs are common.
    Pretraining text of test groups is left out: it may hold the very replies that are tested.
    """
    names = []
    for of_rows in ROW_TYPES:
        for split in SPLITS:
            if (of_rows, split) != ("pretrain", "test"):
                names.append(f"{of_rows}/{split}")
    users = [user for user in PairUser if user is not PairUser.REWARD]
    for split in ("train", "validation"):
        names += [f"{user}/{split}" for user in users]
    return [name for name in names if name.startswith(kind)]


def split_parts(kind: str, table: pa.Table, seed: int, config: SplitConfig) -> Tables:
    """Return clean rows of a kind by the file that they go into; see :func:`file_names`."""
    files = []
    groups = table.column("group").to_pylist()
    splits = assign(groups, seed, config)
    for group, split in zip(groups, splits, strict=True):
        folder: str = kind
        if kind == "preferences" and split != "test":
            folder = pair_user_of(group, seed, config)
        files.append(f"{folder}/{split}")
    of_rows = np.array(files, dtype=object)
    parts = {}
    for name in file_names(kind):
        is_here = pa.array(of_rows == name)
        parts[name] = table.filter(is_here)
    return parts


def write_clean(
    folder: Path, clean: Mapping[str, StoredRows], seed: int, config: SplitConfig
) -> dict[str, KindStatistics]:
    """Write ``FOLDER/SPLIT.parquet`` files, part by part; return statistics of the rows by kind."""
    statistics = {kind: KindStatistics() for kind in clean}
    total = sum(rows.num_rows for rows in clean.values())
    with progress(total, "writing clean data") as bar:
        for kind, rows in clean.items():
            with ExitStack() as stack:
                writers = {}
                for name in file_names(kind):
                    writer = TableWriter(folder / f"{name}.parquet", clean_schema(kind))
                    writers[name] = stack.enter_context(writer)
                for table in rows.parts():
                    parts = split_parts(kind, table, seed, config)
                    for name, part in parts.items():
                        writers[name].write(clean_table(kind, part))
                    statistics[kind].add(kind, table, parts)
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

TRL trains on them as they are: RewardTrainer and DPOTrainer on the preferences, SFTTrainer on the demonstrations. To
train a reward model with margins, where every pair has one: pairs.rename_column("preference_margin", "margin").
"""


def write_readme(folder: Path) -> None:
    """Write README.md, by which ``datasets.load_dataset(folder)`` knows kinds and splits."""
    splits: dict[str, list[str]] = {}
    for name in file_names():
        kind, split = name.split("/")
        splits.setdefault(kind, []).append(split)
    kinds = list(splits)
    lines = []
    for kind in kinds:
        lines.append(f"- config_name: {kind}")
        if kind == kinds[0]:
            lines.append("  default: true")
        lines.append("  data_files:")
        for split in splits[kind]:
            lines.append(f"  - {{split: {split}, path: {kind}/{split}.parquet}}")
    text = README.format(configs="\n".join(lines), kinds=", ".join(kinds))
    (folder / "README.md").write_text(text, encoding="utf-8")


@dataclass
class KindStatistics:
    """Counts and lengths of clean rows of a kind, taken part by part.

    Attributes:
        groups: By file, hashes of the groups in it; under ``ALL`` those of all rows.
        clusters: Hashes of what each pair's prompt asks; none for rows without pairs.
        lengths: By text column, the characters of every row, part by part; the turns of a prompt
            count together.
    """

    rows: int = 0
    files: Counter[str] = field(default_factory=Counter)
    groups: dict[str, list[pa.Array]] = field(default_factory=dict)
    clusters: list[pa.Array] = field(default_factory=list)
    lengths: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    categories: Counter[str] = field(default_factory=Counter)
    margin_known: int = 0

    def add(self, kind: str, table: pa.Table, parts: Tables) -> None:
        """Take in rows and the files that they go into."""
        self.rows += table.num_rows
        for name, part in parts.items():
            self.files[name] += part.num_rows
        for name, part in {ALL: table, **parts}.items():
            digests = _digests(part["group"].to_pylist())
            self.groups.setdefault(name, []).append(digests)
        for name, values in character_lengths(kind, table).items():
            self.lengths.setdefault(name, []).append(values)
        self.categories.update(table.column("category").to_pylist())
        if kind == "preferences":
            groups = table["group"].to_pylist()
            sources = table["source"].to_pylist()
            ids = table["id"].to_pylist()
            names = map(cluster_name, groups, sources, ids)
            self.clusters.append(_digests(names))
        if "margin" in table.column_names:
            self.margin_known += table.num_rows - table.column("margin").null_count

    def all_lengths(self) -> dict[str, npt.NDArray[np.int32]]:
        """Return the characters of every row, by text column."""
        return {name: np.concatenate(parts) for name, parts in self.lengths.items()}

    def length_bias(self) -> dict[str, float]:
        """Return how often the longer reply of a pair is preferred; see :func:`length_bias`."""
        if not self.clusters:
            return {}
        lengths = self.all_lengths()
        questions = pa.chunked_array(self.clusters).combine_chunks()
        clusters = questions.dictionary_encode().indices
        return length_bias(lengths["chosen"], lengths["rejected"], clusters.to_numpy())


def _digests(texts: Iterable[str]) -> pa.Array:
    digests = []
    for text in texts:
        digests.append(blake2b(text.encode(), digest_size=DIGEST_BYTES).digest())
    return pa.array(digests, pa.binary(DIGEST_BYTES))


def length_bias(
    chosen: npt.ArrayLike, rejected: npt.ArrayLike, clusters: npt.ArrayLike
) -> dict[str, float]:
    """Return how often the longer reply is preferred, with Wilson's 95 % interval.

    Pairs of equal length do not count. The interval counts questions: pairs of one question that
    are labelled alike widen it.

    Args:
        chosen: Lengths of the preferred replies (N,).
        rejected: Lengths of the others (N,).
        clusters: The number of the question of each pair (N,).

    Returns:
        ``longer_preferred_share``, ``longer_preferred_low95`` and ``longer_preferred_high95``;
        nothing without such pairs.
    """
    difference = np.asarray(chosen) - np.asarray(rejected)
    unequal = difference != 0
    if not unequal.any():
        return {}
    is_longer = (difference[unequal] > 0).astype(np.float64)
    share = float(is_longer.mean())
    effect = design_effect(is_longer, np.asarray(clusters)[unequal])
    low, high = wilson_bounds(share, len(is_longer) / effect)
    return {
        "longer_preferred_share": share,
        "longer_preferred_low95": low,
        "longer_preferred_high95": high,
    }


def group_overlap(groups: Mapping[str, Sequence[pa.Array]]) -> int:
    """Count groups in more than one split, plus groups shared by two of the reward models.

    Args:
        groups: By file, the groups of its rows, or hashes of them.
    """
    by_split: dict[str, list[pa.Array]] = {split: [] for split in SPLITS}
    by_user: dict[str, list[pa.Array]] = {user: [] for user in PairUser}
    for file, arrays in groups.items():
        folder, _, split = file.partition("/")
        if split in by_split:
            by_split[split] += arrays
        if folder in by_user and split != "test":
            by_user[folder] += arrays
    return _shared(by_split.values()) + _shared(by_user.values())


def _shared(sets: Iterable[Sequence[pa.Array]]) -> int:
    """Return how many values are in more than one of the sets."""
    distinct = [pc.unique(pa.chunked_array(arrays)) for arrays in sets if arrays]
    if not distinct:
        return 0
    counts = pc.value_counts(pa.concat_arrays(distinct)).field("counts")
    is_shared = pc.greater(counts, 1)
    return int(pc.sum(is_shared).as_py() or 0)


def rows_metric(file: str) -> str:
    """Return the metric with the number of rows of a file, such as ``preferences.judge_train``."""
    folder, _, split = file.partition("/")
    kind, _, user = folder.partition("_")
    return f"{kind}.{user}_{split}" if user else f"{kind}.{split}"


def data_metrics(
    validated: Validated,
    statistics: Mapping[str, KindStatistics],
    counts: Mapping[str, Numbers] | None = None,
) -> dict[str, Numbers | float]:
    """Return rows, shares, mean lengths and further ``counts`` by kind, all of them finite."""
    groups: dict[str, list[pa.Array]] = {}
    for of_kind in statistics.values():
        groups |= of_kind.groups
    metrics: dict[str, Numbers | float] = {"group_overlap": float(group_overlap(groups))}
    for kind, of_kind in statistics.items():
        checked = validated.kinds[kind]
        digests = pa.chunked_array(of_kind.groups.get(ALL, []), pa.binary(DIGEST_BYTES))
        numbers = {
            "raw": float(checked.raw_rows),
            "clean": float(of_kind.rows),
            "quarantined": float(checked.quarantined),
            "quarantined_share": checked.quarantined_share,
            "groups": float(len(pc.unique(digests))),
        }
        if checked.left_out:
            numbers["left_out"] = float(checked.left_out)
        if checked.cut:
            numbers["cut"] = float(checked.cut)
        for name in file_names(kind):
            metric = rows_metric(name).removeprefix(f"{kind}.")
            numbers[metric] = float(of_kind.files[name])
        lengths = of_kind.all_lengths() if of_kind.rows else {}
        for name, values in lengths.items():
            numbers[f"mean_{name}_chars"] = int(values.sum()) / of_kind.rows
        if "chosen" in lengths:
            is_longer = lengths["chosen"] > lengths["rejected"]
            longer = int(is_longer.sum())
            unknown = of_kind.rows - of_kind.margin_known
            numbers["chosen_longer_share"] = longer / of_kind.rows
            numbers["margin_known_share"] = 1.0 - unknown / of_kind.rows
        for check, count in sorted(checked.failed.items()):
            numbers[f"failed_{check}"] = float(count)
        for check, count in sorted(checked.warned.items()):
            numbers[f"warned_{check}"] = float(count)
        if counts is not None:
            numbers |= counts.get(kind, {})
        metrics[kind] = numbers
    pretrain = statistics["pretrain"]
    metrics["pretrain_held_out"] = float(pretrain.rows - pretrain.files.total())
    return metrics


# Of a kind; a percentile of as many is off by less than one per cent of the rows.
COUNTED_ROWS = 20_000


def count_tokens(
    clean: Mapping[str, StoredRows], tokenizer: PreTrainedTokenizerBase
) -> dict[str, TokenCounts]:
    """Tokenise the clean rows of every kind that has some as training does, part by part."""
    kinds = {}
    for kind, stored in clean.items():
        if stored.num_rows:
            kinds[kind] = TokenCounts(kind, stored.num_rows)
    total = sum(min(counted.rows, COUNTED_ROWS) for counted in kinds.values())
    with progress(total, "counting tokens") as bar:
        for kind, counted in kinds.items():
            chosen = np.zeros(counted.rows, dtype=bool)
            chosen[evenly_spread(counted.rows, COUNTED_ROWS)] = True
            rows = clean[kind].where(chosen)
            numbers = iter(rows.numbers)
            for part in rows.parts(["id", *CONTENT_FIELDS[kind]]):
                for row in part.to_pylist():
                    origin = rows.origin(next(numbers))
                    counted.add(tokenizer, row | origin)
                bar.advance(part.num_rows)
    return kinds

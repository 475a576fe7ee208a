"""Statistics of rows: lengths, percentiles, correlations, and intervals of shares over clusters.

A cluster has the rows that ask the same question: the content of a question in the synthetic world,
elsewhere the group that prompts are split by. Replies to one question, in whatever form or number,
succeed and fail together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import scipy  # its parts are loaded when they are first used
from numpy.typing import ArrayLike

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, REPLIES, Message, Preference, Prompt
from rlhf_core.errors import UnwritableText
from rlhf_core.world.questions import SOURCE as WORLD
from rlhf_core.world.questions import content_of_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PERCENTILES = (50, 90, 99, 100)
SEQUENCE = "prompt + reply"
# The name of a rule in findings.parquet that no suite has, since only some rows are checked by it.
UNWRITABLE = "writable_by_tokenizer"


def percentiles(lengths: npt.ArrayLike) -> tuple[int, ...]:
    """Return the 50th, 90th, 99th and 100th percentile, each one of the lengths, if any."""
    values = np.asarray(lengths)
    if not len(values):
        return ()
    return tuple(map(int, np.percentile(values, PERCENTILES, method="inverted_cdf")))


def character_lengths(kind: str, table: pa.Table) -> dict[str, npt.NDArray[np.int32]]:
    """Return the characters of each text column (N,); the turns of a prompt count together."""
    lengths = {}
    for name in CONTENT_FIELDS[kind]:
        column = table.column(name).combine_chunks()
        if name == "prompt":
            contents = pc.struct_field(pc.list_flatten(column), "content")
            turns = pc.utf8_length(contents).to_numpy(zero_copy_only=False)
            rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
            counts = np.bincount(rows, weights=turns, minlength=len(column))
        else:
            counts = pc.utf8_length(column).to_numpy(zero_copy_only=False)
        lengths[name] = counts.astype(np.int32)
    return lengths


@dataclass
class TokenCounts:
    """Tokens of rows of a kind, as training writes them.

    Attributes:
        looked_at: How many of them were tokenised.
        lengths: By text column, and for the sequence that training sees, the tokens of each row
            that can be written.
        unwritable: The rows that the tokenizer cannot write, in order.
        marked: How many of the others have a reply with a marker, such as that of reasoning, by
            which the chat template writes it otherwise; training writes it as the template does.
    """

    kind: str
    rows: int
    looked_at: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)
    unwritable: list[RowFinding] = field(default_factory=list)
    marked: int = 0

    def add(self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> None:
        """Tokenise a row, which may have its ``source`` and ``position``, as training writes it.

        The sequence that training sees is a prompt with its longest reply.
        """
        from rlhf_core.data.chat_template import reply_format  # imports torch
        from rlhf_core.data.tokens import encode_columns

        self.looked_at += 1
        content = {name: [row[name]] for name in CONTENT_FIELDS[self.kind]}
        if "prompt" in content:
            turns = [Message(turn["role"], turn["content"]) for turn in row["prompt"]]
            content["prompt"] = [turns]
        try:
            encoded = encode_columns(tokenizer, content)
        except UnwritableText as error:
            origin = row.get("source"), row.get("position")
            finding = RowFinding(
                UNWRITABLE, self.kind, error.reason, *origin, id=row["id"], severity="warn"
            )
            self.unwritable.append(finding)
            return
        tokens = {name: len(ids) for name, (ids,) in encoded.items()}
        if replies := REPLIES[self.kind]:
            longest = max(tokens[name] for name in replies)
            tokens[SEQUENCE] = tokens["prompt"] + longest
            form = reply_format(tokenizer)
            self.marked += any(form.is_marked(row[name]) for name in replies)
        for column, count in tokens.items():
            self.lengths.setdefault(column, []).append(count)

    def metrics(self) -> dict[str, float]:
        """Return ``COLUMN_tokens_PERCENTILE`` for each text column, and for the whole sequence."""
        metrics = {}
        for name, lengths in self.lengths.items():
            column = name.replace(" + ", "_and_")
            values = percentiles(lengths)
            for percentile, value in zip(PERCENTILES, values, strict=True):
                metrics[f"{column}_tokens_{percentile}"] = float(value)
        return metrics


def evenly_spread(total: int, count: int) -> npt.NDArray[np.int64]:
    """Return up to ``count`` of the numbers below ``total``, evenly spread over all of them."""
    spread = np.linspace(0, total - 1, min(total, count))
    return np.unique(spread.astype(np.int64))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's rank correlation of two (n,) arrays, ties by average rank.

    Pairs with a value that is not finite are left out; the result is 0 when either side is
    constant.
    """
    return _correlation(scipy.stats.spearmanr, first, second)


def linear_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two (n,) arrays.

    Pairs with a value that is not finite are left out; the result is 0 when either side is
    constant.
    """
    return _correlation(scipy.stats.pearsonr, first, second)


def _correlation(measure: Callable[..., Any], first: np.ndarray, second: np.ndarray) -> float:
    """Return what ``measure`` gives the finite pairs as float64; 0 when either side is constant."""
    a = np.asarray(first, dtype=np.float64)
    b = np.asarray(second, dtype=np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a = a[finite]
    b = b[finite]
    if not len(a) or (a == a[0]).all() or (b == b[0]).all():
        return 0.0
    return float(measure(a, b).statistic)


CONFIDENCE = 0.95  # one-sided; two-sided intervals have 2.5 % on each side
FEW = 10  # fewer clusters do not tell how much rows of one differ


def cluster_of(row: Prompt | Preference) -> str:
    """Return what a row's prompt is about: its content in the synthetic world, else its group."""
    return cluster_name(row.group, row.source, row.id)


def cluster_name(group: str, source: str, identity: str) -> str:
    """Return the cluster of a row with these values of the columns group, source and id."""
    if is_of_world(source):
        return content_of_group(group)
    return group or identity


def is_of_world(source: str) -> bool:
    """Return whether rows with this value of the column source were made by the synthetic world."""
    return source.partition(":")[0] == WORLD


def clusters_of(rows: Sequence[Prompt | Preference], repeats: int = 1) -> np.ndarray:
    """Return the number of each row's cluster, ``repeats`` times in a row (n * repeats,)."""
    names = [cluster_of(row) for row in rows]
    return np.repeat(cluster_codes(names), repeats)


def cluster_codes(names: Sequence[Hashable]) -> np.ndarray:
    """Number the clusters by first appearance, (n,)."""
    known: dict[Hashable, int] = {}
    codes = [known.setdefault(name, len(known)) for name in names]
    return np.array(codes, dtype=np.int64)


def one_each(count: int, clusters: ArrayLike | None) -> np.ndarray:
    """Return ``clusters``, or for None a cluster of its own for each row."""
    if clusters is None:
        return np.arange(count)
    return np.asarray(clusters, dtype=np.int64)


def cluster_sums(rows: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up rows by cluster: (r, n) -> sums (r, k) and sizes (k,)."""
    sizes = np.bincount(clusters).astype(np.float64)
    sums = np.stack([np.bincount(clusters, weights=row) for row in rows])
    held = sizes > 0
    return sums[:, held], sizes[held]


def standard_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, int]:
    """Return the cluster-robust standard error of a mean (n,), and the number of clusters.

    It is infinite for one cluster.
    """
    deviations = values - values.mean()
    (sums,), sizes = cluster_sums(deviations[np.newaxis], clusters)
    count = len(sizes)
    if count < 2:
        return math.inf, count
    total = float((sums**2).sum())
    variance = total * count / (count - 1)
    return math.sqrt(variance) / len(values), count


def design_effect(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the factor by which clusters widen the variance of a mean (n,).

    It is from 1 up to that of clusters whose rows are all equal, which is taken where fewer than
    :data:`FEW` clusters are known, or all values are equal.
    """
    error, count = standard_error(values, clusters)
    sizes = np.bincount(clusters)
    largest = float((sizes**2).sum() / len(values))
    independent = float(values.var()) / len(values)
    if count < FEW or not independent > 0:
        return largest
    return min(max(error**2 / independent, 1.0), largest)


def wilson_bounds(share: float, count: float) -> tuple[float, float]:
    """Return 95 % bounds (Wilson, 1927) of a share of ``count`` clusters or independent rows.

    Even the lower bound of 1 is below it. Where a cluster counts in part, its variance is smaller
    than the formula's, and the bounds are too wide.
    """
    z = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2))
    squared = z**2
    centre = share + squared / (2 * count)
    variance = share * (1 - share) / count + squared / (4 * count**2)
    half = z * math.sqrt(variance)
    scale = 1 + squared / count
    low = (centre - half) / scale
    high = (centre + half) / scale
    return max(0.0, low), min(1.0, high)

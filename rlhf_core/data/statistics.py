"""Statistics of rows: lengths of texts in characters and tokens, percentiles, and correlations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.schema import CONTENT_FIELDS, REPLIES, Message
from rlhf_core.errors import UnwritableText

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
        from rlhf_core.data.encoding import encode_columns

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
    from scipy.stats import spearmanr

    return _correlation(spearmanr, first, second)


def linear_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two (n,) arrays.

    Pairs with a value that is not finite are left out; the result is 0 when either side is
    constant.
    """
    from scipy.stats import pearsonr

    return _correlation(pearsonr, first, second)


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

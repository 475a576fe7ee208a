"""Lengths of the texts of a table in characters: histograms and percentiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.lengths import PERCENTILES, LengthPercentiles
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.evaluation.data_card.card import CardSection, CardTable, Histogram


def length_section(clean: Mapping[str, pa.Table]) -> CardSection:
    """Return the section on the lengths of every text column of every kind."""
    histograms: list[Histogram] = []
    rows: list[tuple[str | int, ...]] = []
    for kind, table in clean.items():
        for name, lengths in _lengths(kind, table) if table.num_rows else ():
            title = f"{kind}: {name}"
            histograms.append(Histogram.of(title, lengths))
            rows.append((title, *LengthPercentiles.of(name, lengths.tolist()).values))
    header = ("characters", *(f"{p} %" if p < 100 else "longest" for p in PERCENTILES))
    notes = ["Clean rows. The turns of a prompt count together; each bar holds the lengths up to the number below it."]
    return CardSection("Lengths", notes, [CardTable(header, rows)], histograms)


def _lengths(kind: str, table: pa.Table) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    for name in CONTENT_FIELDS[kind]:
        column = table.column(name)
        if name == "prompt":
            parts = [_prompt_lengths(chunk) for chunk in column.chunks]
            yield name, np.concatenate(parts)
        else:
            yield name, pc.utf8_length(column).to_numpy().astype(np.int64)


def _prompt_lengths(prompts: pa.ListArray) -> npt.NDArray[np.int64]:
    turns = pc.list_flatten(prompts)
    characters = pc.utf8_length(pc.struct_field(turns, "content")).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(prompts).to_numpy(zero_copy_only=False)
    return np.bincount(rows, weights=characters, minlength=len(prompts)).astype(np.int64)

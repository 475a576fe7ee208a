"""Lengths of texts in characters: histograms and percentiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.lengths import PERCENTILES, LengthPercentiles
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.validation.stored_rows import StoredRows
from rlhf_core.evaluation.data_card.card import CardSection, CardTable, Histogram


def length_section(clean: Mapping[str, StoredRows]) -> CardSection:
    """Return the section on the lengths of every text column of every kind."""
    histograms: list[Histogram] = []
    rows: list[tuple[str | int, ...]] = []
    for kind, stored in clean.items():
        for name, lengths in _lengths(stored) if stored.num_rows else ():
            title = f"{kind}: {name}"
            histograms.append(Histogram.of(title, lengths))
            rows.append((title, *LengthPercentiles.of(name, lengths.tolist()).values))
    header = ("characters", *(f"{p} %" if p < 100 else "longest" for p in PERCENTILES))
    notes = ["Clean rows. The turns of a prompt count together; each bar holds the lengths up to the number below it."]
    return CardSection("Lengths", notes, [CardTable(header, rows)], histograms)


def _lengths(rows: StoredRows) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    for name in CONTENT_FIELDS[rows.kind]:
        lengths_of = _prompt_lengths if name == "prompt" else _text_lengths
        chunks = (chunk for part in rows.parts([name]) for chunk in part.column(name).chunks)
        yield name, np.concatenate([lengths_of(chunk) for chunk in chunks])


def _text_lengths(texts: pa.StringArray) -> npt.NDArray[np.int64]:
    return pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)


def _prompt_lengths(prompts: pa.ListArray) -> npt.NDArray[np.int64]:
    turns = pc.list_flatten(prompts)
    characters = pc.utf8_length(pc.struct_field(turns, "content")).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(prompts).to_numpy(zero_copy_only=False)
    return np.bincount(rows, weights=characters, minlength=len(prompts)).astype(np.int64)

"""Lengths of texts in characters and tokens: histograms and percentiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.data.lengths import PERCENTILES, SEQUENCE, LengthPercentiles
from rlhf_core.data.schema import CONTENT_FIELDS
from rlhf_core.data.validation.stored_rows import CountedTokens, StoredRows
from rlhf_core.evaluation.data_card.card import CardSection, CardTable, Histogram


def length_section(clean: Mapping[str, StoredRows], tokens: CountedTokens | None = None) -> CardSection:
    """Return the section on the lengths of every text column of every kind, in characters and, if counted, tokens."""
    characters = [
        (f"{kind}: {name}", lengths)
        for kind, stored in clean.items()
        for name, lengths in (_lengths(stored) if stored.num_rows else ())
    ]
    histograms = [Histogram.of(f"{title} (characters)", lengths) for title, lengths in characters]
    tables = [_percentiles("characters", characters)]
    notes = ["Clean rows. The turns of a prompt count together; each bar holds the lengths up to the number below it."]
    if tokens is None:
        notes.append(
            "Lengths are in characters only: validate.tokenizer names no tokenizer. One that is made from nothing "
            "(base.source: scratch) is trained later, on the clean rows."
        )
    else:
        counted = [
            (f"{kind}: {name}", np.array(lengths))
            for kind, of_kind in tokens.kinds.items()
            for name, lengths in of_kind.lengths.items()
        ]
        histograms += [Histogram.of(f"{title} (tokens)", lengths) for title, lengths in counted]
        tables.append(_percentiles("tokens", counted))
        notes += _token_notes(tokens)
    return CardSection("Lengths", notes, tables, histograms)


def _percentiles(unit: str, columns: Sequence[tuple[str, npt.NDArray[np.int64]]]) -> CardTable:
    header = (unit, *(f"{p} %" if p < 100 else "longest" for p in PERCENTILES))
    return CardTable(
        header, [(title, *LengthPercentiles.of(title, list(lengths)).values) for title, lengths in columns]
    )


def _token_notes(tokens: CountedTokens) -> Iterator[str]:
    """Yield how tokens were counted, of how many rows, and which rows the tokenizer cannot write."""
    yield (
        f"Tokens are those of the tokenizer {tokens.tokenizer}, as training writes the rows: a prompt in the chat "
        f"template, a reply with the token that ends it. {SEQUENCE} is a prompt with its longest reply."
    )
    for kind, counted in tokens.kinds.items():
        if counted.looked_at < counted.rows:
            yield f"{kind}: tokens of {counted.looked_at} of {counted.rows} rows were counted, spread evenly."
        first = {row.reason: row for row in reversed(counted.unwritable)}
        for reason, rows in Counter(row.reason for row in counted.unwritable).most_common():
            row = first[reason]
            where = "" if row.source is None else f" (first: {row.source}:{row.position})"
            yield f"{kind}: {rows} row{'s have' if rows > 1 else ' has'} no tokens, since {reason}{where}."


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

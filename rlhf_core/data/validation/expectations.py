"""Expectations for what is ours: visible text, keys, encodings, template tokens, pairs of replies.

They are used by their names in suite files, ``expect_texts_to_hold_no_secrets`` and so on, beside
those of the library. What must hold for every text takes a list of columns: the library's own work
on an expectation costs more than a look at a column. Each metric is computed on Arrow's columns
without a copy. A null passes: ``expect_rows_to_be_complete`` says which columns may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.core.expect_column_values_to_be_null import (
    ExpectColumnValuesToBeNull,
)
from great_expectations.expectations.expectation import (
    ColumnMapExpectation,
    MulticolumnMapExpectation,
)
from great_expectations.expectations.metrics.map_metric_provider import (
    ColumnMapMetricProvider,
    MulticolumnMapMetricProvider,
    column_condition_partial,
    multicolumn_condition_partial,
)

from rlhf_core.data.text import comparable, has_visible_text
from rlhf_core.redaction import SECRETS

Flags = npt.NDArray[np.bool_]
REPEATED_CHARS = 20  # a shorter prompt, as a greeting, is what a reply may well begin with
# Control characters other than tab, newlines and form feed, the C1 block (UTF-8 read as Latin-1),
# and the replacement character.
CONTROL = r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x{9f}\x{fffd}\x{fffe}\x{ffff}]"
# UTF-8 read as Windows-1252: the lead byte of a two-, three- or four-byte character, seen with what
# follows it; two replacement characters read as GBK.
MOJIBAKE = (
    r"Ã[\x{a0}-\x{bf}\x{192}\x{201a}\x{201e}\x{2020}\x{2030}]|Â[\x{a0}-\x{bf}]|â€|ï¿½|ðŸ|锟斤拷"
)
# What the chat templates of common models write between turns, at the end of a text.
TEMPLATE_TOKEN = r"(?:<\|[A-Za-z0-9_]{2,30}\|>|<｜[^｜<>]{2,40}｜>|</s>|<(?:start|end)_of_turn>|<eos>|\[/?INST\])\s*$"
PRINTABLE = r"[!-~]"


def _arrow(column: pd.Series) -> pa.ChunkedArray:
    """Return a column as Arrow holds it; a column of nulls alone as texts."""
    if column.dtype == object:
        array = pa.array(column, from_pandas=True)
    else:
        array = pa.array(column)
    if not isinstance(array, pa.ChunkedArray):
        array = pa.chunked_array([array])
    if pa.types.is_null(array.type):
        array = array.cast(pa.large_string())
    return array


def _numpy(values: pa.ChunkedArray) -> Flags:
    return pc.fill_null(values, False).to_numpy().astype(bool)


def _without(pattern: str) -> Callable[[pd.Series], Flags]:
    """Return a test of texts that may not match a regular expression."""

    def test(column: pd.Series) -> Flags:
        matches = pc.match_substring_regex(_arrow(column), pattern)
        return ~_numpy(matches)

    return test


def _in_all_columns(test: Callable[[pd.Series], Flags]) -> Callable[[pd.DataFrame], Flags]:
    """Return a test of rows that pass it in every column."""
    return lambda columns: np.logical_and.reduce([test(columns[name]) for name in columns])


def _texts(values: pa.ChunkedArray) -> Iterator[str]:
    """Yield the texts of a column without holding all of them."""
    for chunk in values.chunks:
        for text in chunk.to_pylist():
            yield text or ""


def _visible(column: pd.Series) -> Flags:
    texts = _arrow(column)
    passed = _numpy(pc.match_substring_regex(texts, PRINTABLE)) | column.isna().to_numpy()
    doubtful = np.flatnonzero(~passed)
    looked_at = texts.take(pa.array(doubtful))
    for row, text in zip(doubtful, _texts(looked_at), strict=True):
        passed[row] = has_visible_text(text)
    return passed


def _replies_differ(columns: pd.DataFrame) -> Flags:
    passed = [comparable(first) != comparable(second) for first, second in _rows(columns)]
    return np.array(passed, dtype=bool)


def _prompt_not_repeated(columns: pd.DataFrame) -> Flags:
    passed = []
    for turn, *replies in _rows(columns):
        repeated = all(reply.startswith(turn) for reply in replies)
        passed.append(len(turn) < REPEATED_CHARS or not repeated)
    return np.array(passed, dtype=bool)


def _finite(column: pd.Series) -> Flags:
    infinite = pc.invert(pc.is_finite(_arrow(column)))
    return ~_numpy(infinite)


def _rows(columns: pd.DataFrame) -> Iterable[tuple[str, ...]]:
    """Yield the texts of each row without holding all of them."""
    texts = [_texts(_arrow(columns[name])) for name in columns]
    return zip(*texts, strict=True)


def _column_metric(name: str, test: Callable[[pd.Series], Flags]) -> str:
    """Register a metric of the values of a column and return its name."""

    class ColumnTest(ColumnMapMetricProvider):
        condition_metric_name = f"column_values.{name}"
        # Otherwise the rows with a value are copied, texts and all.
        filter_column_isnull = False

        @column_condition_partial(engine=PandasExecutionEngine)
        def _pandas(cls, column: pd.Series, **_: Any) -> pd.Series:
            return pd.Series(test(column), index=column.index)

    return str(ColumnTest.condition_metric_name)


def _row_metric(name: str, test: Callable[[pd.DataFrame], Flags]) -> str:
    """Register a metric of the values that a row has in some columns and return its name."""

    class RowTest(MulticolumnMapMetricProvider):
        condition_metric_name = f"multicolumn_values.{name}"

        @multicolumn_condition_partial(engine=PandasExecutionEngine)  # type: ignore[untyped-decorator]
        def _pandas(cls, column_list: pd.DataFrame, **_: Any) -> pd.Series:
            return pd.Series(test(column_list), index=column_list.index)

    return str(RowTest.condition_metric_name)


class ExpectColumnValuesToHaveVisibleText(ColumnMapExpectation):
    """Expect that every text has a character that is neither white space nor invisible."""

    map_metric: ClassVar[str] = _column_metric("visible_text", _visible)


class ExpectColumnValuesToBeFinite(ColumnMapExpectation):
    """Expect that every number is finite."""

    map_metric: ClassVar[str] = _column_metric("finite", _finite)


class ExpectColumnValuesToHoldNoMojibake(ColumnMapExpectation):
    """Expect that no text was decoded with the wrong encoding."""

    map_metric: ClassVar[str] = _column_metric("no_mojibake", _without(MOJIBAKE))


class ExpectColumnValuesNotToEndWithATemplateToken(ColumnMapExpectation):
    """Expect that no text ends with a token of a chat template that is written out."""

    map_metric: ClassVar[str] = _column_metric("no_template_tokens", _without(TEMPLATE_TOKEN))


class ExpectNoFindings(ColumnMapExpectation):
    """Expect that a rule about the whole set has no findings in the column named after it."""

    map_metric: ClassVar[str] = ExpectColumnValuesToBeNull.map_metric


class _RowExpectation(MulticolumnMapExpectation):
    """An expectation of several columns that is asked of every row, whatever is null in it."""

    ignore_row_if: Literal["never"] = "never"


class ExpectRowsToBeComplete(_RowExpectation):
    """Expect that none of the columns is null."""

    map_metric: ClassVar[str] = _row_metric(
        "complete", _in_all_columns(lambda column: column.notna().to_numpy())
    )


class ExpectRepliesToDiffer(_RowExpectation):
    """Expect that two texts differ in more than white space and invisible characters."""

    map_metric: ClassVar[str] = _row_metric("replies_differ", _replies_differ)


class ExpectRepliesNotToRepeatThePrompt(_RowExpectation):
    """Expect that not all replies begin with the first column, the prompt's last turn."""

    map_metric: ClassVar[str] = _row_metric("prompt_not_repeated", _prompt_not_repeated)


class ExpectTextsToHoldNoSecrets(_RowExpectation):
    """Expect that nothing in the texts looks like an access key or a private key."""

    map_metric: ClassVar[str] = _row_metric("no_secrets", _in_all_columns(_without(SECRETS)))


class ExpectTextsToHoldNoControlCharacters(_RowExpectation):
    """Expect that the texts have no control or replacement characters."""

    map_metric: ClassVar[str] = _row_metric(
        "no_control_characters", _in_all_columns(_without(CONTROL))
    )


# Stages reach these by the names in suite files alone; this list is what makes them part of a
# stage's code.
OWN = (
    ExpectColumnValuesToHaveVisibleText,
    ExpectColumnValuesToBeFinite,
    ExpectColumnValuesToHoldNoMojibake,
    ExpectColumnValuesNotToEndWithATemplateToken,
    ExpectNoFindings,
    ExpectRowsToBeComplete,
    ExpectRepliesToDiffer,
    ExpectRepliesNotToRepeatThePrompt,
    ExpectTextsToHoldNoSecrets,
    ExpectTextsToHoldNoControlCharacters,
)

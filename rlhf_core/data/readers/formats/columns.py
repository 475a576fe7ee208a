"""A user's own names for columns, and a template for the prompt: records of any shape as records of a known format."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from rlhf_core.config.stages.collect import ReadOptions, template_columns
from rlhf_core.data.readers.containers.records import Record
from rlhf_core.data.readers.formats.record_shape import listed
from rlhf_core.data.readers.formats.turns import Refusal, text_of
from rlhf_core.errors import DataError

PROBE = 1000


def with_columns(records: Sequence[Record], options: ReadOptions, where: str) -> Sequence[Record]:
    """Return records with the fields that ``options.columns`` and ``options.template`` name, and with no others.

    A record that lacks one of the columns keeps its value and has that as its problem.

    Raises:
        DataError: None of the first thousand readable records has a column.
    """
    if not options.columns and options.template is None:
        return records
    columns = [*options.columns.values(), *(template_columns(options.template) if options.template else ())]
    _require_columns(records, columns, where)
    return mapped_records(records, options)


def mapped_records(records: Sequence[Record], options: ReadOptions) -> Sequence[Record]:
    """Return what :func:`with_columns` does for records of a file whose columns are known to exist."""
    if not options.columns and options.template is None:
        return records
    return [record if record.problem else _mapped(record, options) for record in records]


def _require_columns(records: Sequence[Record], columns: Sequence[str], where: str) -> None:
    readable = [record.value for record in records[:PROBE] if not record.problem]
    for column in columns:
        if readable and not any(_has_column(value, column) for value in readable):
            names = sorted({str(name) for value in readable if isinstance(value, dict) for name in value})
            raise DataError(f"{where}: no row has a column {column!r}; the columns are {listed(names)}")


def _has_column(value: Any, column: str) -> bool:
    try:
        _column(value, column)
    except Refusal:
        return False
    return True


def _column(value: Any, column: str) -> Any:
    """Return the value of a column; where no column has the whole name, dots go into objects."""
    if isinstance(value, dict) and column in value:
        return value[column]
    first, dot, rest = column.partition(".")
    if not dot or not isinstance(value, dict) or first not in value:
        raise Refusal(f"there is no column {column!r}")
    return _column(value[first], rest)


def _mapped(record: Record, options: ReadOptions) -> Record:
    try:
        mapped = {field: _column(record.value, column) for field, column in options.columns.items()}
        if options.template is not None:
            names = template_columns(options.template)
            texts = {name: text_of(_column(record.value, name), f"the column {name}") for name in names}
            mapped["prompt"] = _filled(options.template, texts)
    except Refusal as refusal:
        return Record(record.position, record.value, str(refusal))
    return Record(record.position, mapped)


def _filled(template: str, texts: dict[str, str]) -> str:
    """Return the template with its columns filled in; ``str.format`` would take a dot in a name for an attribute."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, texts[name] if name is not None else ""]
    return "".join(parts)

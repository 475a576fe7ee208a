"""The corpus of malformed and odd files: all classes of faults together."""

from __future__ import annotations

from unit.data.malformed import (
    compressed,
    csv_faults,
    format_faults,
    json_faults,
    row_faults,
    source_faults,
    tables,
    text_encodings,
)

ODD_FILES = [
    *compressed.FILES,
    *text_encodings.FILES,
    *json_faults.FILES,
    *csv_faults.FILES,
    *tables.FILES,
    *row_faults.FILES,
    *format_faults.FILES,
    *source_faults.FILES,
]

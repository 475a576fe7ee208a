"""The corpus of malformed and odd files: all classes of faults together."""

from __future__ import annotations

from unit.data.malformed import (
    compressed,
    csv_faults,
    encodings,
    format_faults,
    json_faults,
    row_faults,
    source_faults,
    tables,
)

ODD_FILES = [
    *compressed.FILES,
    *encodings.FILES,
    *json_faults.FILES,
    *csv_faults.FILES,
    *tables.FILES,
    *row_faults.FILES,
    *format_faults.FILES,
    *source_faults.FILES,
]

"""Encodings other than UTF-8, byte order marks, halves of surrogate pairs, line ends, and characters nobody sees."""

from __future__ import annotations

import json

from unit.data.malformed.case import OddFile, RowsRead, jsonl, lines, pair, pairs, quarantined, table_text

BOM = b"\xef\xbb\xbf"
CONTROL = "control or replacement characters"
INVALID = "the line is not valid JSON"


def reencoded(label: str, suffix: str, encoding: str, message: str) -> OddFile:
    rows = [*pairs(label), pair(label, chosen="größer")]
    content = {".jsonl": lines(*rows), ".csv": table_text(rows), ".json": json.dumps(rows, ensure_ascii=False).encode()}
    text = content[suffix].decode()
    return OddFile(label, suffix, text.encode(encoding), 3, message)


def with_line(label: str, line: bytes, reason: str) -> OddFile:
    """Return a file of two good pairs and a bad line between them."""
    first, last = pairs(label)
    return jsonl(label, [first, line, last], RowsRead(2, {reason: 1}))


LATIN = '{"prompt": "a?", "chosen": "größer", "rejected": "c"}'.encode("latin-1")
RAW_SURROGATE = b'{"prompt": "a?", "chosen": "b\xed\xa0\xbd", "rejected": "c"}'
OVERLONG = b'{"prompt": "a?", "chosen": "\xc0\xaf", "rejected": "c"}'
PAIR = b'{"prompt": "a?", "chosen": "b", "rejected": "c"}'
SEPARATORS = json.dumps(pair("separators", chosen="a\u2028b\u2029c\x85d"), ensure_ascii=False)
FILES = [
    *(
        reencoded(f"{encoding}{suffix.replace('.', '-')}", suffix, encoding, "is not UTF-8 but UTF-16 or UTF-32")
        for encoding in ("utf-16", "utf-32")
        for suffix in (".jsonl", ".csv")
    ),
    reencoded("utf-16-le-jsonl", ".jsonl", "utf-16-le", "is not UTF-8 but UTF-16 or UTF-32"),
    reencoded("utf-16-be-csv", ".csv", "utf-16-be", "is not UTF-8 but UTF-16 or UTF-32"),
    OddFile("utf-16-json", ".json", json.dumps(pairs("utf-16-json")).encode("utf-16"), 2, RowsRead(2)),
    reencoded("latin-csv", ".csv", "latin-1", "is not UTF-8"),
    OddFile("latin-json", ".json", b"[" + LATIN + b"]", 1, "is not UTF-8"),
    with_line("latin-line", LATIN, INVALID),
    with_line("overlong-line", OVERLONG, INVALID),
    with_line("raw-surrogate", RAW_SURROGATE, "chosen holds half of a surrogate pair"),
    with_line("surrogate-reply", b'{"prompt": "a?", "chosen": "b\\ud800", "rejected": "c"}', "half of a surrogate"),
    with_line("surrogate-prompt", b'{"prompt": "\\udc00?", "chosen": "b", "rejected": "c"}', "half of a surrogate"),
    with_line("surrogate-category", PAIR[:-1] + b', "category": "\\ud83d"}', "category holds half of a surrogate"),
    OddFile("surrogate-keys", ".jsonl", b'{"\\ud800": "a", "\\udfff": "b"}\n', 1, "is of no known format"),
    OddFile("bom-jsonl", ".jsonl", BOM + lines(*pairs("bom-jsonl")), 2, RowsRead(2)),
    OddFile("bom-json", ".json", BOM + json.dumps(pairs("bom-json")).encode(), 2, RowsRead(2)),
    OddFile("bom-csv", ".csv", BOM + table_text(pairs("bom-csv")), 2, RowsRead(2)),
    OddFile("bom-inside-jsonl", ".jsonl", lines(*pairs("bom-a")) + BOM + lines(*pairs("bom-b")), 4, RowsRead(4)),
    OddFile("bom-alone-jsonl", ".jsonl", BOM, 0, "is empty"),
    OddFile("bom-alone-csv", ".csv", BOM, 0, "is empty"),
    OddFile("crlf-jsonl", ".jsonl", lines(*pairs("crlf")).replace(b"\n", b"\r\n"), 2, RowsRead(2)),
    OddFile("cr-csv", ".csv", table_text(pairs("cr-csv")).replace(b"\r\n", b"\r"), 2, RowsRead(2)),
    OddFile("cr-jsonl", ".jsonl", lines(*pairs("cr-jsonl")).replace(b"\n", b"\r"), 2, "Extra data"),
    OddFile("no-last-line-end", ".jsonl", lines(*pairs("no-last"))[:-1], 2, RowsRead(2)),
    OddFile("blank-lines", ".jsonl", lines(*pairs("blank")).replace(b"\n", b"\n\n \t\r\n"), 2, RowsRead(2)),
    OddFile("line-separators", ".jsonl", SEPARATORS.encode(), 1, quarantined(1, CONTROL)),
    OddFile("nul-bytes-jsonl", ".jsonl", bytes(4096), 0, "is not text"),
    OddFile("nul-bytes-csv", ".csv", bytes(4096), 0, "is not text"),
]

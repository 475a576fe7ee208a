"""JSON and JSON lines that other programs accept, that were cut off, or whose numbers and keys no reader keeps."""

from __future__ import annotations

import json
from typing import Any

from unit.data.malformed.case import OddFile, RowsRead, jsonl, lines, pair, pairs, quarantined

INVALID = "the line is not valid JSON"
NOT_JSON = "is not valid JSON"
DEEP = 100_000


def whole(label: str, content: bytes | str, message: str, suffix: str = ".json", written: int = 2) -> OddFile:
    data = content if isinstance(content, bytes) else content.encode()
    return OddFile(label, suffix, data, written, message)


def bad_line(label: str, line: Any, reason: str) -> OddFile:
    """Return a file of good pairs with one bad line, which stands first: it must not decide about the others."""
    return jsonl(label, [line, *pairs(label, 12)], RowsRead(12, {reason: 1}))


def number(label: str, digits: str, expected: RowsRead) -> OddFile:
    """Return a file with one pair whose margin is written as ``digits``."""
    row = json.dumps(pair(label))[:-1] + f', "margin": {digits}}}'
    return jsonl(label, [*pairs(label), row], expected)


def dumped(label: str, **changes: Any) -> str:
    return json.dumps(pair(label, **changes))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


INFINITE = quarantined(3, "margin is not a finite number")
ROWS = json.dumps(pairs("json"))
FIRST, SECOND = (json.dumps(row) for row in pairs("json"))
FILES = [
    whole("json-deep", nested(DEEP), "nested too deeply", written=1),
    whole("json-deep-open", '{"a":' * DEEP, "nested too deeply", written=1),
    bad_line("jsonl-deep", nested(DEEP), INVALID),
    bad_line("jsonl-deep-column", f'{dumped("jsonl-deep-column")[:-1]}, "x": {nested(DEEP)}}}', INVALID),
    jsonl("jsonl-nested", [*pairs("na"), f'{dumped("nb")[:-1]}, "x": {nested(500)}}}'], RowsRead(3, unused=["x"])),
    number("margin-nan", "NaN", INFINITE),
    number("margin-1e999", "1e999", INFINITE),
    number("margin-400-digits", "9" * 400, RowsRead(2, {"the margin is not a finite number": 1})),
    number("margin-5000-digits", "9" * 5000, RowsRead(2, {"an integer of 5000 digits": 1})),
    number("margin-true", "true", RowsRead(2, {"margin 'True' is not a number": 1})),
    number("margin-text", '"large"', RowsRead(2, {"margin 'large' is not a number": 1})),
    number("margin-number-as-text", '"0.5"', RowsRead(3)),
    number("margin-list", "[1]", RowsRead(2, {"is not a number": 1})),
    number("margin-null", "null", RowsRead(3)),
    number("margin-empty", '""', RowsRead(3)),
    number("margin-underscore", '"1_000"', RowsRead(2, {"is not a number": 1})),
    whole("twice-data", f'{{"data": {ROWS}, "data": []}}', "'data' occurs twice"),
    whole("trailing-comma", f"[{FIRST}, {SECOND},]", NOT_JSON),
    whole("single-object", FIRST, "holds a single JSON object", written=1),
    whole("single-null", "null", "holds a single JSON null", written=0),
    whole("data-and-more", f'{{"data": [{FIRST}], "test": [{SECOND}]}}', "lists of rows as 'data' and 'test'"),
    whole("empty-list", "[]", "is empty", written=0),
    whole("list-of-lists", f"[[{FIRST}], [{SECOND}]]", "is of no known format"),
    whole("list-of-numbers", "[1, 2, 3]", "is of no known format", written=3),
    whole("objects-joined", FIRST + SECOND, "Extra data"),
    whole("lists-joined", f"[{FIRST}][{SECOND}]", "goes on behind the end of its list, at line 1 column"),
    whole("lists-in-lines", f"[{FIRST}]\n[{SECOND}]\n", "goes on behind the end of its list, at line 2 column 1"),
    whole("indented-lists-joined", f"[\n{FIRST}\n]\n[\n{SECOND}\n]\n", "goes on behind the end of its list, at line 4"),
    whole("list-in-jsonl", ROWS + "\n", "is of no known format", ".jsonl"),
    whole("list-per-line", f"[{FIRST}]\n[{SECOND}]\n", "is of no known format", ".jsonl"),
    whole("indented-jsonl", json.dumps(pairs("json"), indent=1), "holds JSON over several lines", ".jsonl"),
    whole("indented-objects", "\n".join(json.dumps(r, indent=1) for r in pairs("json")), "several lines", ".jsonl"),
    whole("python-literals", "{'prompt': 'a?', 'chosen': 'b', 'rejected': None}\n", INVALID, ".jsonl", 1),
    OddFile("data-object", ".json", json.dumps({"version": 1, "data": pairs("data-object")}).encode(), 2, RowsRead(2)),
    OddFile("jsonl-as-json", ".json", lines(*pairs("jsonl-as-json")), 2, RowsRead(2)),
    whole("jsonl-as-json-utf-16", "\n".join((FIRST, SECOND)).encode("utf-16"), "is not UTF-8 but UTF-16"),
    whole("list-as-lines", json.dumps(pairs("list-as-lines")), "one list of rows is named .json", ".jsonl"),
    whole("no-line-readable", lines(*pairs("no-line-readable")).replace(b"}", b"},"), "no row before", ".jsonl"),
    OddFile("ndjson", ".ndjson", lines(*pairs("ndjson")), 2, RowsRead(2)),
    bad_line("first-row-cut", dumped("first-row-cut")[:30], INVALID),
    bad_line("first-row-null", None, "does not match the format standard"),
    bad_line("first-row-number", 7, "does not match the format standard"),
    bad_line("first-row-text", "just words", INVALID),
    bad_line("first-row-list", [["a", "b"]], "does not match the format standard"),
    bad_line("first-row-prompt", {"prompt": "only a prompt?"}, "does not match the format standard"),
    bad_line("first-row-comment", "# exported today", INVALID),
    bad_line("line-with-comma", FIRST + ",", INVALID),
    bad_line("two-objects-on-a-line", FIRST + SECOND, INVALID),
    OddFile("last-row-cut", ".jsonl", lines(*pairs("lrc", 3))[:-9], 3, RowsRead(2, {INVALID: 1})),
    jsonl("huge-line", [*pairs("hl"), pair("hl", chosen="word " * 400_000)], quarantined(3, "over 8000 characters")),
    OddFile("empty-jsonl", ".jsonl", b"", 0, "is empty"),
    OddFile("empty-json", ".json", b" \n", 0, "is empty"),
    OddFile("only-line-ends", ".jsonl", b"\n\r\n\n", 0, "is empty"),
]

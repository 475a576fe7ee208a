"""JSON and CSV that other programs accept, that were cut off, or that are not UTF-8."""

from __future__ import annotations

import json
from typing import Any

from unit.data.malformed.case import (
    OddFile,
    RowsRead,
    jsonl,
    lines,
    pair,
    pairs,
    quarantined,
    table_text,
)

INVALID = "the line is not valid JSON"
NOT_JSON = "is not valid JSON"
NOT_UTF8 = "the line is not UTF-8"
DEEP = 100_000


def whole(
    label: str, content: bytes | str, message: str, suffix: str = ".json", written: int = 2
) -> OddFile:
    data = content if isinstance(content, bytes) else content.encode()
    return OddFile(label, suffix, data, written, message)


def bad_line(label: str, line: Any, reason: str) -> OddFile:
    """Return a file of good pairs whose first line is bad: it must not decide about the others."""
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
    bad_line(
        "jsonl-deep-column", f'{dumped("jsonl-deep-column")[:-1]}, "x": {nested(DEEP)}}}', INVALID
    ),
    jsonl(
        "jsonl-nested",
        [*pairs("na"), f'{dumped("nb")[:-1]}, "x": {nested(500)}}}'],
        RowsRead(3, unused=["x"]),
    ),
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
    whole(
        "data-and-more",
        f'{{"data": [{FIRST}], "test": [{SECOND}]}}',
        "lists of rows as 'data' and 'test'",
    ),
    whole("rows-of-another-name", f'{{"rows": {ROWS}}}', "'rows'"),
    whole("rows-and-meta", f'{{"instances": {ROWS}, "meta": "x"}}', "'instances'"),
    whole("empty-list", "[]", "is empty", written=0),
    whole("list-of-lists", f"[[{FIRST}], [{SECOND}]]", "is of no known format"),
    whole("list-of-numbers", "[1, 2, 3]", "is of no known format", written=3),
    whole("objects-joined", FIRST + SECOND, "Extra data"),
    whole(
        "lists-joined",
        f"[{FIRST}][{SECOND}]",
        "goes on behind the end of its list, at line 1 column",
    ),
    whole(
        "lists-in-lines",
        f"[{FIRST}]\n[{SECOND}]\n",
        "goes on behind the end of its list, at line 2 column 1",
    ),
    whole(
        "indented-lists-joined",
        f"[\n{FIRST}\n]\n[\n{SECOND}\n]\n",
        "goes on behind the end of its list, at line 4",
    ),
    whole("list-in-jsonl", ROWS + "\n", "is of no known format", ".jsonl"),
    whole("list-per-line", f"[{FIRST}]\n[{SECOND}]\n", "is of no known format", ".jsonl"),
    whole(
        "indented-jsonl",
        json.dumps(pairs("json"), indent=1),
        "holds JSON over several lines",
        ".jsonl",
    ),
    whole(
        "indented-objects",
        "\n".join(json.dumps(r, indent=1) for r in pairs("json")),
        "several lines",
        ".jsonl",
    ),
    whole(
        "python-literals",
        "{'prompt': 'a?', 'chosen': 'b', 'rejected': None}\n",
        INVALID,
        ".jsonl",
        1,
    ),
    OddFile(
        "data-object",
        ".json",
        json.dumps({"version": 1, "data": pairs("data-object")}).encode(),
        2,
        RowsRead(2),
    ),
    OddFile("jsonl-as-json", ".json", lines(*pairs("jsonl-as-json")), 2, RowsRead(2)),
    whole(
        "jsonl-as-json-utf-16",
        "\n".join((FIRST, SECOND)).encode("utf-16"),
        "is not UTF-8 but UTF-16",
    ),
    whole(
        "list-as-lines",
        json.dumps(pairs("list-as-lines")),
        "one list of rows is named .json",
        ".jsonl",
    ),
    whole(
        "no-line-readable",
        lines(*pairs("no-line-readable")).replace(b"}", b"},"),
        "none of its 2 rows can be read",
        ".jsonl",
    ),
    OddFile("ndjson", ".ndjson", lines(*pairs("ndjson")), 2, RowsRead(2)),
    bad_line("first-row-cut", dumped("first-row-cut")[:30], INVALID),
    bad_line("first-row-null", None, "does not match the format standard"),
    bad_line("first-row-number", 7, "does not match the format standard"),
    bad_line("first-row-text", "just words", INVALID),
    bad_line("first-row-list", [["a", "b"]], "does not match the format standard"),
    bad_line(
        "first-row-prompt", {"prompt": "only a prompt?"}, "does not match the format standard"
    ),
    bad_line("first-row-comment", "# exported today", INVALID),
    bad_line("line-with-comma", FIRST + ",", INVALID),
    bad_line("two-objects-on-a-line", FIRST + SECOND, INVALID),
    OddFile("last-row-cut", ".jsonl", lines(*pairs("lrc", 3))[:-9], 3, RowsRead(2, {INVALID: 1})),
    jsonl(
        "huge-line",
        [*pairs("hl"), pair("hl", chosen="word " * 400_000)],
        quarantined(3, "over 8000 characters"),
    ),
    OddFile("empty-jsonl", ".jsonl", b"", 0, "is empty"),
    OddFile("empty-json", ".json", b" \n", 0, "is empty"),
    OddFile("only-line-ends", ".jsonl", b"\n\r\n\n", 0, "is empty"),
]


BOM = b"\xef\xbb\xbf"
CONTROL = "control or replacement characters"


def reencoded(label: str, suffix: str, encoding: str, message: str) -> OddFile:
    rows = [*pairs(label), pair(label, chosen="größer")]
    content = {
        ".jsonl": lines(*rows),
        ".csv": table_text(rows),
        ".json": json.dumps(rows, ensure_ascii=False).encode(),
    }
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
FILES += [
    *(
        reencoded(
            f"{encoding}{suffix.replace('.', '-')}",
            suffix,
            encoding,
            "is not UTF-8 but UTF-16 or UTF-32",
        )
        for encoding in ("utf-16", "utf-32")
        for suffix in (".jsonl", ".csv")
    ),
    reencoded("utf-16-le-jsonl", ".jsonl", "utf-16-le", "is not UTF-8 but UTF-16 or UTF-32"),
    reencoded("utf-16-be-csv", ".csv", "utf-16-be", "is not UTF-8 but UTF-16 or UTF-32"),
    OddFile(
        "utf-16-json", ".json", json.dumps(pairs("utf-16-json")).encode("utf-16"), 2, RowsRead(2)
    ),
    reencoded("latin-csv", ".csv", "latin-1", "is not UTF-8"),
    OddFile("latin-json", ".json", b"[" + LATIN + b"]", 1, "is not UTF-8"),
    with_line("latin-line", LATIN, NOT_UTF8),
    with_line("overlong-line", OVERLONG, NOT_UTF8),
    with_line("raw-surrogate", RAW_SURROGATE, "chosen holds half of a surrogate pair"),
    with_line(
        "surrogate-reply",
        b'{"prompt": "a?", "chosen": "b\\ud800", "rejected": "c"}',
        "half of a surrogate",
    ),
    with_line(
        "surrogate-prompt",
        b'{"prompt": "\\udc00?", "chosen": "b", "rejected": "c"}',
        "half of a surrogate",
    ),
    with_line(
        "surrogate-category",
        PAIR[:-1] + b', "category": "\\ud83d"}',
        "category holds half of a surrogate",
    ),
    OddFile(
        "surrogate-keys",
        ".jsonl",
        b'{"\\ud800": "a", "\\udfff": "b"}\n',
        1,
        "is of no known format",
    ),
    OddFile("bom-jsonl", ".jsonl", BOM + lines(*pairs("bom-jsonl")), 2, RowsRead(2)),
    OddFile("bom-json", ".json", BOM + json.dumps(pairs("bom-json")).encode(), 2, RowsRead(2)),
    OddFile("bom-csv", ".csv", BOM + table_text(pairs("bom-csv")), 2, RowsRead(2)),
    OddFile(
        "bom-inside-jsonl",
        ".jsonl",
        lines(*pairs("bom-a")) + BOM + lines(*pairs("bom-b")),
        4,
        RowsRead(4),
    ),
    OddFile("bom-alone-jsonl", ".jsonl", BOM, 0, "is empty"),
    OddFile("bom-alone-csv", ".csv", BOM, 0, "is empty"),
    OddFile("crlf-jsonl", ".jsonl", lines(*pairs("crlf")).replace(b"\n", b"\r\n"), 2, RowsRead(2)),
    OddFile("cr-csv", ".csv", table_text(pairs("cr-csv")).replace(b"\r\n", b"\r"), 2, RowsRead(2)),
    OddFile("cr-jsonl", ".jsonl", lines(*pairs("cr-jsonl")).replace(b"\n", b"\r"), 2, "Extra data"),
    OddFile("no-last-line-end", ".jsonl", lines(*pairs("no-last"))[:-1], 2, RowsRead(2)),
    OddFile(
        "blank-lines",
        ".jsonl",
        lines(*pairs("blank")).replace(b"\n", b"\n\n \t\r\n"),
        2,
        RowsRead(2),
    ),
    OddFile("line-separators", ".jsonl", SEPARATORS.encode(), 1, quarantined(1, CONTROL)),
    OddFile("nul-bytes-jsonl", ".jsonl", bytes(4096), 0, "is not text"),
    OddFile("nul-bytes-csv", ".csv", bytes(4096), 0, "is not text"),
]


HEADER, MARGIN = "prompt,chosen,rejected\n", "prompt,chosen,rejected,margin\n"
HEADER_AGAIN = RowsRead(4, {"repeats the header": 1})
FEWER, MORE = "fewer fields than the header", "more fields than the header"
AS_TEXT = "is a dialogue written out as text"
QUOTE = "a quote that is opened there is not closed"


def table(
    label: str,
    text: str,
    written: int,
    expected: str | RowsRead,
    suffix: str = ".csv",
    tail: bytes = b"",
) -> OddFile:
    return OddFile(label, suffix, text.encode() + tail, written, expected)


def good(label: str, count: int = 2) -> str:
    """Return the lines of good pairs, without the header."""
    return table_text(pairs(label, count)).decode().partition("\r\n")[2]


FILES += [
    table(
        "csv-open-quote",
        f'{HEADER}a,b,c\nd,"e,f\n{good("open-quote")}',
        4,
        "line 3: not readable CSV",
    ),
    table("csv-quote-behind-lines", f'{HEADER}"a\nb",c,d\n"e,f,g\n', 2, "line 4: not readable CSV"),
    table(
        "csv-quote-closed-late", f'{HEADER}a,b,c\n"d,e,f\n"g",h,i\n', 3, "line 3: not readable CSV"
    ),
    table("csv-quote-not-doubled", f'{HEADER}"say "hi"",b,c\n', 1, QUOTE),
    table("csv-escaped-quote", f'{HEADER}"say \\"hi\\" now",b,c\n', 1, QUOTE),
    table("tsv-open-quote", 'prompt\tchosen\trejected\na\t"b\tc\nd\te\tf\n', 2, QUOTE, ".tsv"),
    table(
        "csv-quote-inside", f'{HEADER}a "b" c?,say "x",no\n{good("quote-inside")}', 3, RowsRead(3)
    ),
    table("csv-fewer-fields", f"{HEADER}a,b\n{good('fewer')}", 3, RowsRead(2, {FEWER: 1})),
    table("csv-more-fields", f"{HEADER}a,b,c,d\n{good('more')}", 3, RowsRead(2, {MORE: 1})),
    table(
        "csv-ragged",
        f"{HEADER}a\nb,c,d,e\n{good('ragged')}f,g\n",
        5,
        RowsRead(2, {FEWER: 2, MORE: 1}),
    ),
    table("csv-all-ragged", f"{HEADER}a,b\nc,d\n", 2, FEWER),
    table(
        "csv-twice-a-column", "prompt,chosen,rejected,chosen\na,b,c,d\n", 1, "names 'chosen' twice"
    ),
    table("csv-no-header", good("no-header"), 2, "is of no known format"),
    table("csv-header-only", HEADER, 0, "is empty"),
    table("tsv-commas", table_text(pairs("commas")).decode(), 2, RowsRead(2), ".tsv"),
    table(
        "csv-index-column",
        f",{HEADER}0,a index?,b,c\n1,d index?,e,f\n",
        2,
        RowsRead(2, unused=[""]),
    ),
    table("csv-two-unnamed", f",,{HEADER}0,1,a unnamed?,b,c\n", 1, RowsRead(1, unused=[""])),
    table(
        "csv-header-again", f"{HEADER}{good('again-a')}{HEADER}{good('again-b')}", 5, HEADER_AGAIN
    ),
    table(
        "csv-files-joined",
        f"{HEADER}{good('joined-a')}\ufeff{HEADER}{good('joined-b')}",
        5,
        HEADER_AGAIN,
    ),
    table(
        "csv-blank-lines",
        f"\n{HEADER}\n{good('blank-a', 1)}\n\n{good('blank-b', 1)}\n",
        2,
        RowsRead(2),
    ),
    table(
        "csv-empty-fields",
        f"{HEADER},,\n{good('empty-fields')}",
        3,
        quarantined(3, "chosen is empty"),
    ),
    table(
        "csv-nul",
        f"{HEADER}nul?,a\0b,c\n{good('csv-nul')}",
        3,
        quarantined(3, "control or replacement"),
    ),
    table("csv-crlf-inside", f'{HEADER}"crlf\r\n?",a,b\r\n{good("csv-crlf")}', 3, RowsRead(3)),
    table(
        "csv-long-field",
        f"{HEADER}long?,{'x' * 200_000},c\n",
        1,
        quarantined(1, "over 8000 characters"),
    ),
    table("csv-margin", f"{MARGIN}margin?,a,b,0.5\nmargin 2?,a,b,\n", 2, RowsRead(2)),
    table(
        "csv-margin-text",
        f"{MARGIN}mt?,a,b,much\nmt 2?,a,b,1\n",
        2,
        RowsRead(1, {"not a number": 1}),
    ),
    table(
        "csv-json-text", 'prompt,chosen,rejected\n"[{""role"": ""manager""}]",a,b\n', 1, RowsRead(1)
    ),
    table(
        "csv-dialogue",
        f"{HEADER}\"[{{'content': 'a?', 'role': 'user'}}]\",a,b\n",
        1,
        RowsRead(0, {AS_TEXT: 1}),
    ),
    table(
        "csv-verse-inside",
        f'{HEADER}verse?,"red, blue\ngreen, grey, white\nall, none",b\n',
        1,
        RowsRead(1),
    ),
    table("csv-lines-inside", 'prompt\n"a\nb\nc\nd"\n', 1, "holds no preferences"),
    table(
        "csv-late-Latin-1",
        HEADER + "late?,a,b\n" * 1100,
        1101,
        "line 1102, is not UTF-8 (byte 0xe9",
        tail=b"caf\xe9,a,b\n",
    ),
]

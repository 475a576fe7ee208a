"""Tables of text: quotes, ragged rows, headers, delimiters."""

from __future__ import annotations

from unit.data.malformed.case import OddFile, RowsRead, pairs, quarantined, table_text

HEADER, MARGIN = "prompt,chosen,rejected\n", "prompt,chosen,rejected,margin\n"
HEADER_AGAIN = RowsRead(4, {"repeats the header": 1})
FEWER, MORE = "fewer fields than the header", "more fields than the header"
AS_TEXT = "is a dialogue written out as text"
QUOTE = "a quote that is opened there is not closed"


def table(
    label: str, text: str, written: int, expected: str | RowsRead, suffix: str = ".csv", tail: bytes = b""
) -> OddFile:
    return OddFile(label, suffix, text.encode() + tail, written, expected)


def good(label: str, count: int = 2) -> str:
    """Return the lines of good pairs, without the header."""
    return table_text(pairs(label, count)).decode().partition("\r\n")[2]


FILES = [
    table("csv-open-quote", f'{HEADER}a,b,c\nd,"e,f\n{good("open-quote")}', 4, "line 3: not readable CSV"),
    table("csv-quote-behind-lines", f'{HEADER}"a\nb",c,d\n"e,f,g\n', 2, "line 4: not readable CSV"),
    table("csv-quote-closed-late", f'{HEADER}a,b,c\n"d,e,f\n"g",h,i\n', 3, "line 3: not readable CSV"),
    table("csv-quote-not-doubled", f'{HEADER}"say "hi"",b,c\n', 1, QUOTE),
    table("csv-escaped-quote", f'{HEADER}"say \\"hi\\" now",b,c\n', 1, QUOTE),
    table("tsv-open-quote", 'prompt\tchosen\trejected\na\t"b\tc\nd\te\tf\n', 2, QUOTE, ".tsv"),
    table("csv-quote-inside", f'{HEADER}a "b" c?,say "x",no\n{good("quote-inside")}', 3, RowsRead(3)),
    table("csv-fewer-fields", f"{HEADER}a,b\n{good('fewer')}", 3, RowsRead(2, {FEWER: 1})),
    table("csv-more-fields", f"{HEADER}a,b,c,d\n{good('more')}", 3, RowsRead(2, {MORE: 1})),
    table("csv-ragged", f"{HEADER}a\nb,c,d,e\n{good('ragged')}f,g\n", 5, RowsRead(2, {FEWER: 2, MORE: 1})),
    table("csv-all-ragged", f"{HEADER}a,b\nc,d\n", 2, FEWER),
    table("csv-twice-a-column", "prompt,chosen,rejected,chosen\na,b,c,d\n", 1, "names 'chosen' twice"),
    table("csv-no-header", good("no-header"), 2, "is of no known format"),
    table("csv-header-only", HEADER, 0, "is empty"),
    table("tsv-commas", table_text(pairs("commas")).decode(), 2, RowsRead(2), ".tsv"),
    table("csv-index-column", f",{HEADER}0,a index?,b,c\n1,d index?,e,f\n", 2, RowsRead(2, unused=[""])),
    table("csv-two-unnamed", f",,{HEADER}0,1,a unnamed?,b,c\n", 1, RowsRead(1, unused=[""])),
    table("csv-header-again", f"{HEADER}{good('again-a')}{HEADER}{good('again-b')}", 5, HEADER_AGAIN),
    table("csv-files-joined", f"{HEADER}{good('joined-a')}\ufeff{HEADER}{good('joined-b')}", 5, HEADER_AGAIN),
    table("csv-blank-lines", f"\n{HEADER}\n{good('blank-a', 1)}\n\n{good('blank-b', 1)}\n", 2, RowsRead(2)),
    table("csv-empty-fields", f"{HEADER},,\n{good('empty-fields')}", 3, quarantined(3, "chosen is empty")),
    table("csv-nul", f"{HEADER}nul?,a\0b,c\n{good('csv-nul')}", 3, quarantined(3, "control or replacement")),
    table("csv-crlf-inside", f'{HEADER}"crlf\r\n?",a,b\r\n{good("csv-crlf")}', 3, RowsRead(3)),
    table("csv-long-field", f"{HEADER}long?,{'x' * 200_000},c\n", 1, quarantined(1, "over 8000 characters")),
    table("csv-margin", f"{MARGIN}margin?,a,b,0.5\nmargin 2?,a,b,\n", 2, RowsRead(2)),
    table("csv-margin-text", f"{MARGIN}mt?,a,b,much\nmt 2?,a,b,1\n", 2, RowsRead(1, {"not a number": 1})),
    table("csv-json-text", 'prompt,chosen,rejected\n"[{""role"": ""manager""}]",a,b\n', 1, RowsRead(1)),
    table("csv-dialogue", f"{HEADER}\"[{{'content': 'a?', 'role': 'user'}}]\",a,b\n", 1, RowsRead(0, {AS_TEXT: 1})),
    table("csv-verse-inside", f'{HEADER}verse?,"red, blue\ngreen, grey, white\nall, none",b\n', 1, RowsRead(1)),
    table("csv-lines-inside", 'prompt\n"a\nb\nc\nd"\n', 1, "holds no preferences"),
    table(
        "csv-late-Latin-1",
        HEADER + "late?,a,b\n" * 1100,
        1101,
        "line 1102, is not UTF-8 (byte 0xe9",
        tail=b"caf\xe9,a,b\n",
    ),
]

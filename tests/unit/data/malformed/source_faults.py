"""Paths that hold no ordinary file, and options of a source that do not fit what it holds."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from unit.data.malformed.case import OddFile, RowsRead, jsonl, lines, pairs


def special(label: str, make: Any, message: str, name: str = "x.jsonl") -> OddFile:
    return OddFile(label, name, make, 0, message)


def loop(path: Path) -> None:
    path.symlink_to(path.with_name("y.jsonl"))
    path.with_name("y.jsonl").symlink_to(path)


def listening(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket is at most 108 bytes long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def questions(label: str, *changes: dict[str, Any]) -> bytes:
    """Return rows of columns that no known format has."""
    rows = [{"title": f"{label} {n}", "body": "text", "best": f"good {n}", "worst": f"bad {n}"} for n in range(12)]
    return lines(
        *rows, *({"title": f"{label} x", "body": "text", "best": "good x", "worst": "bad x"} | c for c in changes)
    )


def mapped(label: str, expected: str | RowsRead, *changes: dict[str, Any], **options: Any) -> OddFile:
    return OddFile(label, ".jsonl", questions(label, *changes), 12 + len(changes), expected, options=options)


COLUMNS = {"prompt": "title", "chosen": "best", "rejected": "worst"}
REPLIES = {"chosen": "best", "rejected": "worst"}
FILES = [
    special("folder", Path.mkdir, "x.jsonl holds no file of data"),
    special("symlink-loop", loop, "is no file that can be read"),
    special("dangling-symlink", lambda path: path.symlink_to("gone.jsonl"), "is no file that can be read"),
    special("fifo", os.mkfifo, "is no file that can be read"),
    special("missing", lambda path: None, "no file matches"),
    special("glob-of-nothing", lambda path: None, "no file matches", "*.parquet"),
    OddFile("bytes-in-name", os.fsdecode(b"bytes-in-name\xff.jsonl"), lines(*pairs("b")), 2, "is not UTF-8"),
    special("no-suffix", lambda path: path.write_bytes(lines(*pairs("a"))), "unknown kind of file", "pairs"),
    special("text-suffix", lambda path: path.write_bytes(b"a\n"), "unknown kind of file '.txt'", "x.txt"),
    special("bz2", lambda path: path.write_bytes(b"BZh9"), "unknown kind of file '.bz2'", "x.jsonl.bz2"),
    special("only-compression", lambda path: path.write_bytes(b"a"), "unknown kind of file '.gz'", "x.gz"),
    OddFile("brackets", "x[1].jsonl", lines(*pairs("brackets")), 2, RowsRead(2)),
    OddFile("tilde", "~x~.jsonl", lines(*pairs("tilde")), 2, RowsRead(2)),
    OddFile("line-break-in-name", "x\ny.jsonl", lines(*pairs("line-break")), 2, RowsRead(2)),
    OddFile("spaces-in-name", " x y .jsonl", lines(*pairs("spaces")), 2, RowsRead(2)),
    OddFile("Chinese-name", "数据.jsonl", lines(*pairs("Chinese")), 2, RowsRead(2)),
    mapped("no-options", "is of no known format"),
    mapped("column-misspelt", "no row has a column 'bset'", columns=COLUMNS | {"chosen": "bset"}),
    mapped("column-missing-once", RowsRead(12, {"does not match": 1}), {"title": None}, columns=COLUMNS),
    mapped("template-column-missing", "no row has a column 'text'", columns=REPLIES, template="{title} {text}"),
    mapped(
        "template-null",
        RowsRead(12, {"body is missing": 1}),
        {"body": None},
        columns=REPLIES,
        template="{title} {body}",
    ),
    mapped("columns-without-pair", "holds no preferences", columns={"prompt": "title"}),
    mapped("format-that-does-not-fit", RowsRead(0, {"does not match the format hh-rlhf": 12}), format="hh-rlhf"),
    jsonl(
        "dotted-column",
        [*({"q": {"text": f"dotted {n}?"}, "a": "good", "b": "bad"} for n in range(2))],
        RowsRead(2),
        options={"columns": {"prompt": "q.text", "chosen": "a", "rejected": "b"}},
    ),
    *(
        jsonl(f"plain-{kind}", [*({name: f"plain {n}?"} for n in range(60))], RowsRead(60), kind=kind)
        for kind, name in (("prompts", "prompt"), ("pretrain", "text"))
    ),
]

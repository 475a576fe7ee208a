"""One row of a file as it is, the kinds of files that hold rows, and content that is not what a file's name says."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rlhf_core.errors import DataError

KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
# Dialogues shrink to a tenth; what expands further than this was made to fill the memory, or is no text.
MAX_EXPANSION = 200
ALWAYS_ALLOWED = 64 * 2**20
# The first bytes of files of other kinds, and the suffix that the readers know them by.
MAGIC = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\xfd7zXZ\x00", "xz", ".xz"),
    (b"PAR1", "parquet", ".parquet"),
    (b"ARROW1", "arrow", ".arrow"),
)
ZIP = b"PK\x03\x04"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
WEB_PAGE = (b"<!doctype html", b"<html")
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
HEAD = 4096


@dataclass(frozen=True)
class Record:
    """One row of a file, as it is.

    Attributes:
        position: Counted from 1: the line in jsonl and csv (of a row of several lines the first), the row elsewhere.
        value: The parsed row, or its raw text if it could not be parsed.
        problem: Why the row could not be parsed.
    """

    position: int
    value: Any
    problem: str = ""


def kind_of(name: str) -> tuple[str, str]:
    """Return the suffixes that tell what a file is and how it is compressed ("" where it is not)."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes else ""
    if kind not in KINDS:
        given = kind or compression or "without suffix"
        known = f"{', '.join(KINDS)}, each also with {', '.join(COMPRESSIONS)}"
        raise DataError(f"{name}: unknown kind of file {given!r}; known are {known}")
    return kind, compression


def expansion_limit(size: int) -> int:
    """Return how many bytes a compressed file of this size may expand to."""
    return max(ALWAYS_ALLOWED, MAX_EXPANSION * size)


def require_content(name: str, content: bytes) -> None:
    """Refuse what a download leaves in place of a file.

    Raises:
        DataError: It is a web page, or the pointer that Git LFS keeps for a file.
    """
    if content.startswith(LFS_POINTER):
        raise DataError(f"{name} is a pointer of Git LFS, not the file itself; get that with `git lfs pull`")
    if content[:HEAD].lstrip().lower().startswith(WEB_PAGE):
        raise DataError(f"{name} is a web page, not data: the download may have needed a login; get the file again")


def require_text(name: str, content: bytes, allow_utf16: bool = False) -> None:
    """Refuse bytes that are no text in UTF-8, of which a reader could make rows all the same.

    Args:
        allow_utf16: UTF-16 and UTF-32 are read too, as JSON is.

    Raises:
        DataError: It is compressed, of another kind of file, or in UTF-16 or UTF-32.
    """
    for magic, kind, suffix in MAGIC:
        if content.startswith(magic):
            raise DataError(f"{name} is {kind} by its content; give it a name that ends with {suffix}, or unpack it")
    if content.startswith(ZIP):
        raise DataError(f"{name} is a zip archive (tables of Excel are too); unpack it, or save the table as CSV")
    head = content[:HEAD]
    if not head.strip(b"\0"):
        raise DataError(f"{name} is not text: it begins with {len(head)} zero bytes; get the file again")
    if not allow_utf16:
        require_narrow_text(name, head)


def require_narrow_text(name: str, content: bytes) -> None:
    """Raise ``DataError`` for content that begins as UTF-16 or UTF-32 does."""
    if content.startswith(WIDE_MARKS) or b"\0" in content[:2]:
        raise DataError(f"{name} is not UTF-8 but UTF-16 or UTF-32; save it as UTF-8")

"""Content that is not what a file's name says: compressed or binary data, a web page, a pointer, UTF-16."""

from __future__ import annotations

import codecs

from rlhf_core.errors import DataError

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

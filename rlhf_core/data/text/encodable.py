"""Text that UTF-8 can encode: JSON can spell half of a surrogate pair, which no tokenizer and no file takes."""

from __future__ import annotations

HALF_PAIR = "holds half of a surrogate pair, which is no valid Unicode"


def is_encodable(text: str) -> bool:
    """Return whether ``text`` can be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

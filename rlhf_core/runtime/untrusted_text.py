"""Scans of texts that strangers wrote, each in time that grows no faster than the text.

Python's ``re`` holds the interpreter while it searches, and a pattern that fails at the end of a
text is tried again from the next place that fits. Where every place of a text fits, as in a string
of escaped quotes that is never closed, 85 kB take minutes, in which a server answers nobody.
"""

from __future__ import annotations

import re

# A string that is not closed ends with the text, and an escape at the end needs nothing to follow:
# either would otherwise be looked for again from each of its quotes.
_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)', re.DOTALL)
_QUOTE = re.compile(r"""['"]""")
_LITERALS = {
    quote: re.compile(rf"{quote}((?:[^{quote}\\]++|\\.)*+){quote}", re.DOTALL) for quote in "'\""
}


def without_json_strings(text: str) -> str:
    """Return JSON, which may be cut off, without its strings."""
    return _JSON_STRING.sub("", text)


def string_literals(source: str) -> list[str]:
    """Return what stands between quotes in source code, with escapes as they are written."""
    found: list[str] = []
    unclosed: set[str] = set()
    position = 0
    while quote := _QUOTE.search(source, position):
        position = quote.end()
        if quote[0] in unclosed:
            continue
        literal = _LITERALS[quote[0]].match(source, quote.start())
        if literal is None:
            # All later quotes of this kind are escaped, or one of them had closed this one.
            unclosed.add(quote[0])
        else:
            found.append(literal[1])
            position = literal.end()
    return found

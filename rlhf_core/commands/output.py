"""What commands print: text or JSON, in which no control character of the data reaches a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import typer

PIPE_WIDTH = 120


def terminal_width() -> int:
    """Return the columns that output may take: those of the terminal, or ``PIPE_WIDTH`` where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def print_text(text: str) -> None:
    """Print lines that quote data, with control characters of the data as their escapes."""
    from rlhf_core.data.text import for_terminal

    typer.echo(for_terminal(text))


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON; control characters that JSON allows in a text are escaped too."""
    import json
    import re

    text = json.dumps(value, ensure_ascii=False, indent=2)
    typer.echo(re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text))

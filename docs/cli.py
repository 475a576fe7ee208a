"""A hook of MkDocs: the command line as mkdocs-click reads it for cli.md, its help texts as Markdown."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import typer.main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flows.cli import app
from flows.commands.options import plain_parameters

command: Any = typer.main.get_command(app)
plain_parameters(command, typer.Context(command, info_name="rlhf", **command.context_settings))
waiting = [command]
while waiting:
    described = waiting.pop()
    text = re.sub(r"\[/?bold\]", "**", described.help)
    text = re.sub(r"^Example: (.+)$", r"Example: `\1`", text, flags=re.MULTILINE)
    described.help = re.sub(r"^\$ ", "    $ ", text.replace("Examples:\n", "Examples:\n\n"), flags=re.MULTILINE)
    waiting += getattr(described, "commands", {}).values()

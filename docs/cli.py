"""A hook of MkDocs: the command line as mkdocs-click reads it for cli.md, its help texts as
Markdown.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).resolve().parents[1]
# The site's environment has no rlhf-pipeline installed, whose entry points are the commands of
# extras.
doors = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "entry-points"
]
installed = Path(tempfile.mkdtemp(), "rlhf_pipeline-0.dist-info")
installed.mkdir()
(installed / "METADATA").write_text("Name: rlhf-pipeline\nVersion: 0\n")
commands = [f"{name} = {target}" for name, target in doors["rlhf.commands"].items()]
(installed / "entry_points.txt").write_text("\n".join(["[rlhf.commands]", *commands]))
sys.path[:0] = [str(ROOT), str(installed.parent)]
from flows.cli import app  # noqa: E402
from flows.commands.options import plain_parameters  # noqa: E402

command: Any = typer.main.get_command(app)
command.mount_plugins(typer.Context(command, info_name="rlhf"))
plain_parameters(command, typer.Context(command, info_name="rlhf", **command.context_settings))
waiting = [command]
while waiting:
    described = waiting.pop()
    text = re.sub(r"\[/?bold\]", "**", described.help)
    text = re.sub(r"^Example: (.+)$", r"Example: `\1`", text, flags=re.MULTILINE)
    described.help = re.sub(
        r"^\$ ", "    $ ", text.replace("Examples:\n", "Examples:\n\n"), flags=re.MULTILINE
    )
    waiting += getattr(described, "commands", {}).values()
